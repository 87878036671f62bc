from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gmmvit_cli.options import (
    CPU_KERNELS,
    ENGINE,
    NAME,
    REQUEST_PIXELS,
    access_from,
    cpu_kernels_from,
    require_output,
    server_from,
)
from gmmvit_cli.output import note, print_json
from gmmvit_cli.panels import FORCE, INPUT, JSON_OPTION, PRECISION, Panel, listed, output_option, together
from gmmvit_cli.progress import progress
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.precision import PRECISIONS, precision_from
from gmmvit_deploy.serving.names import ACCELERATORS, BACKENDS, DEFAULT_REQUEST_PIXELS, RUNTIMES, runtime_from

if TYPE_CHECKING:
    from gmmvit_deploy.runtimes.engines.compatibility import ServerTensorRT
    from gmmvit_deploy.runtimes.programs.access import Access

EXAMPLE = """gmmvit repository bundle -o model_repository
gmmvit repository bundle --runtime openvino+kernels --instances 2 --threads 4"""

_BACKEND, _BATCHING = Panel("Backend"), Panel("Batching and instances")


def repository(
    bundle: Path = INPUT.argument("BUNDLE", "The bundle to serve."),
    engine: Path | None = ENGINE,
    backend: str = _BACKEND.option(
        "NAME",
        "Triton backend that runs the network. python: ONNX Runtime or OpenVINO in Triton's Python backend, which "
        "every server has. onnxruntime: Triton's ONNX Runtime backend. tensorrt: the engine of --engine.",
        default="python",
        names=BACKENDS,
    ),
    runtime: str | None = _BACKEND.option(
        "NAME",
        f"Runtime of --backend python: {listed(RUNTIMES)}. The suffix +kernels adds this project's CPU kernels.",
        names=RUNTIMES,
        read=runtime_from,
        show_default="openvino+kernels where available, else openvino, else onnxruntime",
    ),
    cpu_kernels: str | None = CPU_KERNELS,
    precision: str = PRECISION.option(
        "NAME",
        f"Precision of the network with --backend python or onnxruntime: {listed(PRECISIONS)}.",
        default="fp32",
        names=PRECISIONS,
        read=precision_from,
    ),
    accelerator: str = _BACKEND.option(
        "NAME",
        "Accelerator of --backend onnxruntime on a GPU: cuda, tensorrt, or none for the CPU. With tensorrt, the "
        "server builds a TensorRT engine when the server loads the model.",
        default="none",
        names=ACCELERATORS,
    ),
    max_queue_delay_us: int = _BATCHING.option(
        "US", "Longest time, in microseconds, that a request waits for more requests to fill the batch.", default=0
    ),
    instances: int = _BATCHING.option("N", "Number of copies of the network that run in parallel.", default=1),
    threads: int = _BATCHING.option(
        "N",
        "CPU threads of each copy; 0 means a thread for each core of the server, or of this machine with --backend "
        "onnxruntime.",
        default=0,
    ),
    chunk: int = _BATCHING.option(
        "N",
        "Largest number of images that a core computes at once, a power of two up to 128, with --backend python; "
        "0 means 4 in ONNX Runtime and 16 in OpenVINO.",
        default=0,
    ),
    preprocess_threads: int = _BATCHING.option(
        "N", "Threads and processes that decode images; 0 means as many as there are cores.", default=0
    ),
    request_pixels: int | None = REQUEST_PIXELS,
    name: str = NAME,
    server: partial[ServerTensorRT | None] = together(server_from),
    access: partial[Access] = together(access_from),
    out: Path = output_option("REPOSITORY", "Folder to write the repository to.", default=Path("model_repository")),
    force: bool = FORCE,
    as_json: bool = JSON_OPTION,
) -> None:
    """A bundle is the folder that gmmvit export writes. The repository holds the network, its preprocessing,
    and ensembles that answer encoded images, such as JPEG files, with logits or with labels.
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
    from gmmvit_deploy.runtimes.programs.cores import cores
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
            server=server(access()),
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
    if backend == "onnxruntime" and threads == 0:
        note(f"threads: {cores()}, the cores of this machine; for a server on another machine, type --threads N")
    note(f"models: {', '.join(written.models)}")
    typer.echo(out)
