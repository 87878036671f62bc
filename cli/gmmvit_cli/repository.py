from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from gmmvit_cli.options import (
    CPU_KERNELS,
    FORCE,
    SERVER,
    SERVER_TENSORRT,
    SERVER_VERSION,
    cpu_kernels_from,
    server_from,
)
from gmmvit_cli.output import JSON_OPTION, note, print_json
from gmmvit_deploy.errors import InputError


def repository(
    bundle: Path = typer.Argument(help="A bundle that gmmvit export wrote."),
    out: Path = typer.Option(Path("model_repository"), "-o", "--output", help="The repository to write."),
    backend: str = typer.Option(
        "python",
        help="python: ONNX Runtime or OpenVINO in Triton's Python backend, which every server has. "
        "onnxruntime: Triton's own. tensorrt: an engine.",
    ),
    runtime: str | None = typer.Option(
        None,
        help="Of --backend python: onnxruntime or openvino, in its own operators; onnxruntime+kernels or "
        "openvino+kernels, with our CPU kernels.  [default: onnxruntime, with or without as --cpu-kernels says]",
    ),
    cpu_kernels: str | None = CPU_KERNELS,
    name: str = typer.Option("gmmvit", help="Name of the model on the server."),
    precision: str = typer.Option(
        "fp32", help="Of what the python and onnxruntime backends run; openvino: fp32, bf16, int8."
    ),
    accelerator: str = typer.Option("none", help="tensorrt: the server's ONNX Runtime builds an engine at load."),
    engine: Path | None = typer.Option(None, help="An engine that gmmvit build wrote, for --backend tensorrt."),
    server_version: str | None = SERVER_VERSION,
    server: str | None = SERVER,
    server_tensorrt: str | None = SERVER_TENSORRT,
    max_queue_delay_us: int = typer.Option(0, help="How long a request may wait for others to fill its batch."),
    instances: int = typer.Option(1, help="Copies of the network that run side by side."),
    threads: int = typer.Option(0, help="Threads of an instance; 0 is one a core."),
    force: bool = FORCE,
    as_json: bool = JSON_OPTION,
) -> None:
    """Write a Triton model repository: the network, its preprocessing, and the ensemble of the two."""
    from gmmvit_deploy.artifacts import open_bundle
    from gmmvit_deploy.engines.card import open_engine
    from gmmvit_deploy.precision import precision_from
    from gmmvit_deploy.serving.model_configs import RepositoryOptions, runtime_from
    from gmmvit_deploy.serving.repository import repository_from_bundle

    kernels = cpu_kernels_from(cpu_kernels)
    if runtime is not None and kernels is not None:
        raise InputError(
            f"--runtime {runtime} already says whether our kernels are in it; --cpu-kernels goes without --runtime"
        )
    named, mode = runtime_from(runtime) if runtime is not None else ("onnxruntime", kernels or "auto")
    options = RepositoryOptions(
        backend=backend,  # type: ignore[arg-type]  # checked there, with the error that users see
        runtime=named,
        cpu_kernels=mode,
        name=name,
        max_queue_delay_us=max_queue_delay_us,
        instances=instances,
        threads=threads,
        precision=precision_from(precision),
        accelerator=accelerator,
    )
    written = repository_from_bundle(
        open_bundle(bundle),
        out,
        options,
        engine=open_engine(engine) if engine else None,
        server=server_from(server_version, server, server_tensorrt),
        force=force,
    )
    if as_json:
        print_json(
            {
                "repository": str(out),
                "models": written.models,
                "skipped": written.skipped,
                "cpu_kernels": asdict(written.cpu_kernels),
            }
        )
        return
    for reason in written.skipped:
        note(f"skipped: {reason}")
    note(f"cpu kernels: {written.cpu_kernels}")
    note(f"models: {', '.join(written.models)}")
    typer.echo(out)
