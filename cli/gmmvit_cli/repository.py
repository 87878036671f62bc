from __future__ import annotations

from pathlib import Path

import typer

from gmmvit_cli.options import (
    AS_JSON,
    CA,
    ENGINE_FOLDER,
    FORCE,
    KEY_FILE,
    MODEL_NAME,
    REQUEST_PIXELS,
    RUNNER_OF_GRAPHS,
    SERVER_RELEASE,
    SERVER_TENSORRT_VERSION,
    SERVER_URL,
    access_from,
    server_from,
)
from gmmvit_cli.output import note, print_json
from gmmvit_cli.panels import INPUT, Panel, output_option
from gmmvit_cli.progress import progress
from gmmvit_deploy.runtimes.runners.names import ON_CPUS, ON_GPUS, runner_from
from gmmvit_deploy.serving.names import BACKENDS, DEFAULT_REQUEST_PIXELS, Backend

EXAMPLE = """gmmvit repository bundle -o model_repository
gmmvit repository bundle --runner openvino:bf16 --instances 2 --threads 4"""

_BACKEND, _BATCHING = Panel("Backend"), Panel("Batching and instances")


def repository(
    bundle: Path = INPUT.argument("BUNDLE", "The bundle to serve."),
    engine: Path | None = ENGINE_FOLDER,
    backend: Backend | None = _BACKEND.option(
        "NAME",
        "Triton backend that runs the network. python: ONNX Runtime or OpenVINO in Triton's Python backend, which "
        "every server has. onnxruntime: Triton's ONNX Runtime backend. tensorrt: the engine of --engine.",
        names=BACKENDS,
        show_default="python; onnxruntime for a --runner on a GPU",
    ),
    runner: str | None = RUNNER_OF_GRAPHS,
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
        "0 means 4 in ONNX Runtime and 8 in OpenVINO.",
        default=0,
    ),
    preprocess_threads: int = _BATCHING.option(
        "N", "Threads and processes that decode images; 0 means as many as there are cores.", default=0
    ),
    request_pixels: int | None = REQUEST_PIXELS,
    name: str = MODEL_NAME,
    server_version: str | None = SERVER_RELEASE,
    server: str | None = SERVER_URL,
    server_tensorrt: str | None = SERVER_TENSORRT_VERSION,
    key_file: Path | None = KEY_FILE,
    ca: Path | None = CA,
    out: Path = output_option("REPOSITORY", "Folder to write the repository to.", default=Path("model_repository")),
    force: bool = FORCE,
    as_json: bool = AS_JSON,
) -> None:
    """A bundle is the folder that gmmvit export writes. The repository holds the network, its preprocessing,
    and ensembles that answer encoded images, such as JPEG files, with logits or with labels.
    """
    from gmmvit_deploy.bundle.artifacts import open_bundle
    from gmmvit_deploy.inference.cores import cores
    from gmmvit_deploy.runtimes.engines.card import open_engine
    from gmmvit_deploy.serving.options import RepositoryOptions
    from gmmvit_deploy.serving.repository import repository_from_bundle
    from gmmvit_deploy.serving.repository_runner import resolved_options

    named = None if runner is None else runner_from(runner)
    default: Backend = "onnxruntime" if named is not None and named.name in ON_GPUS else "python"
    options = RepositoryOptions(
        backend=backend or default,
        runner=named,
        name=name,
        max_queue_delay_us=max_queue_delay_us,
        instances=instances,
        threads=threads,
        chunk=chunk,
        preprocess_threads=preprocess_threads,
        request_pixels=DEFAULT_REQUEST_PIXELS if request_pixels is None else request_pixels,
    )
    with progress("repository") as on_progress:
        opened = open_bundle(bundle)
        options, notes = resolved_options(opened, options, ON_CPUS if backend else (*ON_CPUS, *ON_GPUS))
        written = repository_from_bundle(
            opened,
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
                "runner": written.runner,
                "notes": notes,
            }
        )
        return
    for reason in written.skipped:
        note(f"skipped: {reason}")
    for line in (*notes, f"runner: {written.runner}"):
        note(line)
    if options.backend == "onnxruntime" and threads == 0:
        note(f"threads: {cores()}, the cores of this machine; for a server on another machine, type --threads N")
    note(f"models: {', '.join(written.models)}")
    typer.echo(out)
