"""Write a Triton model repository: the folder of models that a Triton server loads."""

from __future__ import annotations

import io
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gmmvit_deploy import inference
from gmmvit_deploy.bundle.artifacts import GOLDEN_FILE, Bundle
from gmmvit_deploy.bundle.artifacts import LABELS_FILE as BUNDLE_LABELS_FILE
from gmmvit_deploy.bundle.variants import how_to_convert
from gmmvit_deploy.errors import InputError, RepositoryError
from gmmvit_deploy.files.writing import new_folder
from gmmvit_deploy.graphs.weights import files_of
from gmmvit_deploy.images.spec import image_from_pixels
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.runtimes.engines.card import Engine, require_bundle
from gmmvit_deploy.runtimes.engines.compatibility import ServerTensorRT, loads_on, server_tensorrt
from gmmvit_deploy.runtimes.kernels.libraries import openvino_library
from gmmvit_deploy.runtimes.programs.openvino import kernels_for_graph
from gmmvit_deploy.runtimes.runners.open import graph_of
from gmmvit_deploy.serving.model_configs import LABELS_FILE, WARMUP_FILE, config_text, model_configs
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository_runner import resolved_options

__all__ = ["Repository", "add_to_repository", "repository_from_bundle"]

_TRITON_MODELS = Path(__file__).parent / "triton_models"
_INFERENCE = Path(inference.__path__[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A written repository.

    path: the folder to give to ``tritonserver --model-repository``.
    models: the names of the models; clients call the first model.
    skipped: a sentence for each model that could not be written, with the reason.
    runner: the runner of the network, as the models state it.
    notes: why the runner that ``runners.json`` prefers, or a faster one, is not used.
    """

    path: Path
    models: tuple[str, ...]
    skipped: tuple[str, ...]
    runner: str
    notes: tuple[str, ...] = ()


def repository_from_bundle(
    bundle: Bundle,
    out: Path,
    options: RepositoryOptions | None = None,
    *,
    engine: Engine | None = None,
    server: ServerTensorRT | None = None,
    notes: Mapping[str, str] | None = None,
    force: bool = False,
    on_progress: OnProgress = ignore,
) -> Repository:
    """Write a repository with the network, the preprocessing of images, the labels, and the ensembles of these.

    engine: an engine that was built from this bundle; required for the tensorrt backend.
    server: the TensorRT of the server that will load the engine; required for the tensorrt backend.
    notes: name of a file → text of the file. These files are written beside the folders of the models, and Triton
    ignores these files.
    force: True to replace an existing folder at ``out``.
    Errors:
        RepositoryError: the tensorrt backend has no engine, or an engine that the server cannot load.
        EngineError: the engine was built from another bundle.
        InputError: the CPU kernels are required but not available, or ``server`` is missing for the tensorrt backend.
        OutputError: ``out`` exists and ``force`` is False, or writing fails.
    """
    on_progress(Progress("check the graph"))
    options, said = resolved_options(bundle, options or RepositoryOptions())
    runner = options.runner
    library: Path | None = None
    if runner is None:
        source, target = _plan(bundle, engine, server), "model.plan"
    else:
        if engine is not None:
            raise RepositoryError(
                f"--engine needs --backend tensorrt, got --backend {options.backend}",
                hint="remove --engine, or add --backend tensorrt",
            )
        source, target = _graph(bundle, runner), "model.onnx"
        if runner.kernels:
            on_progress(Progress("find the attentions that the CPU kernels compute"))
            library = _kernels(source, runner)
    on_progress(Progress("write the models"))
    configs = model_configs(bundle, options, engine.card if engine else None)
    with new_folder(out, force=force) as folder:
        for name, config in configs.items():
            model = folder / name
            (model / "1").mkdir(parents=True)
            (model / "config.pbtxt").write_text(config_text(config), encoding="utf-8")
            if any(output.label_filename for output in config.output):
                shutil.copyfile(bundle.path / BUNDLE_LABELS_FILE, model / LABELS_FILE)
        network = folder / options.network / "1"
        _copy_graph(source, network / target)
        if runner is not None and runner.cascade:
            _copy_graph(bundle.onnx_path, network / "again.onnx")
        shutil.copyfile(bundle.path / GOLDEN_FILE, network / GOLDEN_FILE)
        if options.backend == "python":
            _write_code(network, "network_model.py")
        if library is not None:
            shutil.copyfile(library, network / "openvino_kernels.so")
        if options.preprocess in configs:
            _write_code(folder / options.preprocess / "1", "preprocess_model.py")
            _write_warmup(folder / options.preprocess / "warmup", bundle)
        if options.labels in configs:
            _write_code(folder / options.labels / "1", "labels_model.py")
        for name, text in (notes or {}).items():
            (folder / name).write_text(text, encoding="utf-8")
    skipped = () if options.preprocess in configs else (_NO_PREPROCESSING,)
    return Repository(
        path=out,
        models=tuple(configs),
        skipped=skipped,
        runner=configs[options.network].parameters["gmmvit_runner"].string_value,
        notes=said,
    )


def add_to_repository(
    bundle: Bundle,
    models: Path,
    options: RepositoryOptions,
    *,
    engine: Engine | None = None,
    server: ServerTensorRT | None = None,
    on_progress: OnProgress = ignore,
) -> Repository:
    """Write the models of a bundle into the folder ``models``, beside those of others; after an error, none of them.

    Errors: those of `repository_from_bundle`.
    """
    part = models / f".{options.name}"  # Triton takes each visible folder for a model
    written = repository_from_bundle(bundle, part, options, engine=engine, server=server, on_progress=on_progress)
    for model in written.models:
        (part / model).rename(models / model)
    part.rmdir()
    return replace(written, path=models)


_NO_PREPROCESSING = (
    "the preprocessing model, which accepts encoded images (JPEG, PNG), was not written, because the bundle has no "
    "mean and std; to add this model, type gmmvit export with --dataset, or with --mean and --std"
)


def _graph(bundle: Bundle, runner: RunnerName) -> Path:
    graph = graph_of(bundle, runner)
    if graph.only_openvino and runner.runtime != "openvino":
        raise InputError(
            f"{graph.path}: OpenVINO alone quantises activations of this int8 graph, while it runs",
            hint=f"type --runner openvino:{graph.precision}, or "
            f"{how_to_convert(bundle, graph.precision).removeprefix('type ')}",
        )
    return graph.path


def _copy_graph(source: Path, target: Path) -> None:
    graph, *weights = files_of(source)
    shutil.copyfile(graph, target)
    for file in weights:  # under the name that the graph states
        shutil.copyfile(file, target.with_name(file.name))


def _plan(bundle: Bundle, engine: Engine | None, server: ServerTensorRT | None) -> Path:
    if engine is None:
        raise RepositoryError(
            f"{bundle.path}: --backend tensorrt needs an engine that was built from this bundle",
            hint=f"type gmmvit build {bundle.path} --flavor tensorrt on the machine whose GPU will serve the model; "
            "then repeat this command with --engine DIR",
        )
    require_bundle(bundle, engine)
    if reason := loads_on(engine.card, server or server_tensorrt()):
        raise RepositoryError(
            f"{engine.path}: {reason}",
            hint=f"type gmmvit doctor {bundle.path} --server-version RELEASE to check which engines a server can load",
        )
    if not any(profile.minimum == 1 for profile in engine.card.profiles):
        raise RepositoryError(
            f"{engine.path}: the engine has no profile for a batch of 1, which Triton's batcher may send",
            hint=f"type gmmvit build {bundle.path} --batch 1:8:{engine.card.max_batch} for an engine that accepts "
            "a batch of 1",
        )
    return engine.plan_path


def _kernels(network: Path, runner: RunnerName) -> Path:
    """Return the library of this project's CPU kernels for a network.  Errors: InputError when they cannot run it."""
    kernels, why = kernels_for_graph(network, runner.precision)
    library, _ = openvino_library()
    if kernels is None or library is None:
        raise InputError(
            f"runner {runner} cannot run on this machine: {why}",
            hint=f"type --runner {replace(runner, kernels=False)} to run the same graph without this project's CPU "
            "kernels",
        )
    return library


def _write_code(folder: Path, model: str) -> None:
    """Write the code of a Python model: ``model.py``, and `gmmvit_deploy.inference`, the package that it imports.

    Triton may load a model from a copy of its folder alone, so the package is in the folder of each model.
    """
    shutil.copyfile(_TRITON_MODELS / model, folder / "model.py")
    (folder / "gmmvit_inference").mkdir()
    for file in _INFERENCE.glob("*.py"):
        shutil.copyfile(file, folder / "gmmvit_inference" / file.name)


def _write_warmup(folder: Path, bundle: Bundle) -> None:
    import numpy as np

    encoded = io.BytesIO()
    image_from_pixels(np.full(bundle.manifest.image.pixels_shape, 128, np.uint8)).save(encoded, "PNG")
    folder.mkdir()
    (folder / WARMUP_FILE).write_bytes(struct.pack("<I", encoded.tell()) + encoded.getvalue())
