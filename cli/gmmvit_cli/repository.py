from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from gmmvit_cli.options import (
    AS_JSON,
    DEFAULT_NAME,
    ENGINE_FOLDER,
    FORCE,
    MODEL_NAME,
    REQUEST_PIXELS,
    RUNNER_OF_GRAPHS,
    of_fields,
    options_of_target,
    target_from,
)
from gmmvit_cli.output import note, print_json
from gmmvit_cli.panels import INPUT, Panel, output_option, refusals_of
from gmmvit_cli.progress import progress
from gmmvit_deploy.runtimes.runners.names import ON_CPUS, ON_GPUS, runner_from
from gmmvit_deploy.serving.names import BACKENDS, DEFAULT_REQUEST_PIXELS, Backend

COLLECTS = True
SHARED = (options_of_target,)
EXAMPLE = """gmmvit repository bundle -o model_repository
gmmvit repository bundle --runner openvino:bf16 --instances 2 --threads 4
gmmvit repository shop cats=cats_bundle -o models"""

_BACKEND, _BATCHING = Panel("Backend"), Panel("Batching and instances")


def repository(
    context: typer.Context,
    bundles: list[str] = INPUT.argument(
        "BUNDLE",
        "The bundle to serve. Several bundles are served under the names of their folders; NAME=BUNDLE states another "
        "name.",
    ),
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
    preprocess_threads: int = _BATCHING.option(
        "N", "Threads and processes that decode images; 0 means as many as there are cores.", default=0
    ),
    request_pixels: int | None = REQUEST_PIXELS,
    name: str = MODEL_NAME,
    out: Path = output_option("REPOSITORY", "Folder to write the repository to.", default=Path("model_repository")),
    force: bool = FORCE,
    as_json: bool = AS_JSON,
) -> None:
    """A bundle is the folder that gmmvit export writes. The repository holds the network, its preprocessing,
    and ensembles that answer encoded images, such as JPEG files, with logits or with labels.
    """
    from gmmvit_deploy.bundle.artifacts import open_bundle
    from gmmvit_deploy.files.writing import new_folder
    from gmmvit_deploy.inference.cores import cores
    from gmmvit_deploy.runtimes.engines.card import open_engine
    from gmmvit_deploy.serving.named_bundles import named_paths
    from gmmvit_deploy.serving.options import RepositoryOptions
    from gmmvit_deploy.serving.repository import Repository, add_to_repository
    from gmmvit_deploy.serving.repository_runner import resolved_options

    refusals = refusals_of(context)
    paths = {}
    with refusals.collected():
        paths = named_paths(bundles, name)
    several = len(bundles) > 1
    hint = "type NAME=BUNDLE for another name than that of the folder"
    named_here = several or "=" in bundles[0]
    refusals.refuse(named_here and name != DEFAULT_NAME, "--name needs a single bundle without a name", hint=hint)
    refusals.refuse(
        several and engine, "--engine needs a single bundle", hint="type a single bundle, or remove --engine"
    )
    refusals.raise_all()
    named = None if runner is None else runner_from(runner)
    default: Backend = "onnxruntime" if named is not None and named.name in ON_GPUS else "python"
    read = {
        "backend": backend or default,
        "runner": named,
        "request_pixels": DEFAULT_REQUEST_PIXELS if request_pixels is None else request_pixels,
    }
    settings = RepositoryOptions(**{**of_fields(RepositoryOptions, context.params), **read})
    written, notes, told, skipped = dict[str, Repository](), list[str](), list[str](), list[str]()
    with progress("repository") as on_progress:
        opened = {served: open_bundle(path) for served, path in paths.items()}
        of_engine = open_engine(engine) if engine else None
        tensorrt = target_from(context.params)
        with new_folder(out, force=force) as models:
            for served, bundle in opened.items():
                options = replace(settings, name=served)
                options, said = resolved_options(bundle, options, ON_CPUS if backend else (*ON_CPUS, *ON_GPUS))
                written[served] = made = add_to_repository(
                    bundle, models, options, engine=of_engine, server=tensorrt, on_progress=on_progress
                )
                own = [*(f"skipped: {reason}" for reason in made.skipped), *said, f"runner: {made.runner}"]
                before = f"{served}: " if several else ""
                if options.backend == "onnxruntime" and threads == 0:
                    own.append(f"threads: {cores()}, the cores of this machine; for another machine, type --threads N")
                told += [before + line for line in own]
                skipped += [before + reason for reason in made.skipped]
                notes += [before + line for line in said]
    models_of = [model for made in written.values() for model in made.models]
    if as_json:
        runners = {served: made.runner for served, made in written.items()}
        print_json(
            {
                "repository": str(out),
                "models": models_of,
                "skipped": skipped,
                "runner": None if several else next(iter(runners.values())),
                "runners": runners,
                "notes": notes,
            }
        )
        return
    for line in told:
        note(line)
    note(f"models: {', '.join(models_of)}")
    typer.echo(out)
