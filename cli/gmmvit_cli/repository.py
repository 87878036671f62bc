from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from gmmvit_cli.access import CA, KEY_FILE, access_from
from gmmvit_cli.choices import choice_from, complete, listed, read_by
from gmmvit_cli.options import (
    CPU_KERNELS,
    ENGINE,
    FORCE,
    INPUT,
    NAME,
    OUTPUT,
    PRECISION,
    REQUEST_PIXELS,
    SERVER,
    SERVER_TENSORRT,
    SERVER_VERSION,
    cpu_kernels_from,
    require_output,
    server_from,
)
from gmmvit_cli.output import JSON_OPTION, note, print_json
from gmmvit_cli.progress import progress
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.precision import PRECISIONS, precision_from
from gmmvit_deploy.serving.names import ACCELERATORS, BACKENDS, DEFAULT_REQUEST_PIXELS, RUNTIMES, runtime_from

EXAMPLE = """gmmvit repository bundle -o model_repository
gmmvit repository bundle --runtime openvino+kernels --instances 2 --threads 4"""

_BACKEND, _BATCHING = "Backend", "Batching and instances"


def repository(
    bundle: Path = typer.Argument(metavar="BUNDLE", rich_help_panel=INPUT, help="The bundle to serve."),
    engine: Path | None = ENGINE,
    backend: str = typer.Option(
        "python",
        metavar="NAME",
        rich_help_panel=_BACKEND,
        help="Triton backend that runs the network. python: ONNX Runtime or OpenVINO in Triton's Python backend, which "
        "every server has. onnxruntime: Triton's ONNX Runtime backend. tensorrt: the engine of --engine.",
        callback=choice_from("--backend", lambda: BACKENDS),
        autocompletion=complete(lambda: BACKENDS),
    ),
    runtime: str | None = typer.Option(
        None,
        metavar="NAME",
        rich_help_panel=_BACKEND,
        show_default="openvino+kernels where available, else openvino, else onnxruntime",
        help=f"Runtime of --backend python: {listed(RUNTIMES)}. The suffix +kernels adds this project's CPU kernels.",
        callback=read_by(runtime_from),
        autocompletion=complete(lambda: RUNTIMES),
    ),
    cpu_kernels: str | None = CPU_KERNELS,
    precision: str = typer.Option(
        "fp32",
        metavar="NAME",
        rich_help_panel=PRECISION,
        help=f"Precision of the network with --backend python or onnxruntime: {listed(PRECISIONS)}.",
        callback=read_by(precision_from),
        autocompletion=complete(lambda: PRECISIONS),
    ),
    accelerator: str = typer.Option(
        "none",
        metavar="NAME",
        rich_help_panel=_BACKEND,
        help="Accelerator of --backend onnxruntime on a GPU: cuda, tensorrt, or none for the CPU. With tensorrt, the "
        "server builds a TensorRT engine when the server loads the model.",
        callback=choice_from("--accelerator", lambda: ACCELERATORS),
        autocompletion=complete(lambda: ACCELERATORS),
    ),
    max_queue_delay_us: int = typer.Option(
        0,
        metavar="US",
        rich_help_panel=_BATCHING,
        help="Longest time, in microseconds, that a request waits for more requests to fill the batch.",
    ),
    instances: int = typer.Option(
        1, metavar="N", rich_help_panel=_BATCHING, help="Number of copies of the network that run in parallel."
    ),
    threads: int = typer.Option(
        0, metavar="N", rich_help_panel=_BATCHING, help="CPU threads of each copy; 0 means a thread for each core."
    ),
    chunk: int = typer.Option(
        0,
        metavar="N",
        rich_help_panel=_BATCHING,
        help="Largest number of images that a core computes at once, a power of two up to 128, with --backend python; "
        "0 means 4 in ONNX Runtime and 16 in OpenVINO.",
    ),
    preprocess_threads: int = typer.Option(
        0,
        metavar="N",
        rich_help_panel=_BATCHING,
        help="Threads and processes that decode images; 0 means as many as there are cores.",
    ),
    request_pixels: int | None = REQUEST_PIXELS,
    name: str = NAME,
    server_version: str | None = SERVER_VERSION,
    server: str | None = SERVER,
    server_tensorrt: str | None = SERVER_TENSORRT,
    key_file: Path | None = KEY_FILE,
    ca: Path | None = CA,
    out: Path = typer.Option(
        Path("model_repository"),
        "-o",
        "--output",
        metavar="REPOSITORY",
        rich_help_panel=OUTPUT,
        help="Folder to write the repository to.",
    ),
    force: bool = FORCE,
    as_json: bool = JSON_OPTION,
) -> None:
    """A bundle is the folder that gmmvit export writes. The repository holds three models: the network, its
    preprocessing, and an ensemble that runs both on encoded images such as JPEG files.
    """
    require_output(out, force=force)
    kernels = cpu_kernels_from(cpu_kernels)
    if runtime is not None and kernels is not None:
        raise InputError(
            f"--runtime {runtime} already states whether CPU kernels are used, so --cpu-kernels cannot be added",
            hint=f"type --runtime {runtime} or --cpu-kernels {kernels}, not both",
        )
    from gmmvit_deploy.bundle.artifacts import open_bundle
    from gmmvit_deploy.runtimes.engines.card import open_engine
    from gmmvit_deploy.serving.model_configs import RepositoryOptions
    from gmmvit_deploy.serving.repository import repository_from_bundle

    named, mode = runtime_from(runtime) if runtime is not None else ("auto", kernels or "auto")
    options = RepositoryOptions(
        backend=backend,  # type: ignore[arg-type]  # checked there, with the error that users see
        runtime=named,  # type: ignore[arg-type]  # auto becomes the usual runtime
        cpu_kernels=mode,
        name=name,
        max_queue_delay_us=max_queue_delay_us,
        instances=instances,
        threads=threads,
        chunk=chunk,
        preprocess_threads=preprocess_threads,
        precision=precision_from(precision),
        accelerator=accelerator,
        request_pixels=DEFAULT_REQUEST_PIXELS if request_pixels is None else request_pixels,
    )
    with progress("repository") as on_progress:
        written = repository_from_bundle(
            open_bundle(bundle),
            out,
            options,
            engine=open_engine(engine) if engine else None,
            server=server_from(server_version, server, server_tensorrt, access_from(key_file, ca)),
            force=force,
            on_progress=on_progress,
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
