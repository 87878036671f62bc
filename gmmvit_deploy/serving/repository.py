"""Bundle → Triton model repository."""

from __future__ import annotations

import io
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gmmvit_deploy.preprocess
from gmmvit_deploy.artifacts import LABELS_FILE as BUNDLE_LABELS_FILE
from gmmvit_deploy.artifacts import Bundle
from gmmvit_deploy.engines.card import Engine, require_bundle
from gmmvit_deploy.engines.compatibility import ServerTensorRT, loads_on, server_tensorrt
from gmmvit_deploy.errors import RepositoryError
from gmmvit_deploy.images import image_from_pixels
from gmmvit_deploy.kernels import matcher, openvino_kernels, openvino_view, prepared_masks
from gmmvit_deploy.kernels.libraries import openvino_library
from gmmvit_deploy.runtime import onnxruntime_program, openvino_program
from gmmvit_deploy.runtime.onnxruntime import fused_graph
from gmmvit_deploy.runtime.openvino import graph_precision
from gmmvit_deploy.serving.model_configs import (
    LABELS_FILE,
    WARMUP_FILE,
    RepositoryOptions,
    config_text,
    model_configs,
)
from gmmvit_deploy.variants import open_variant
from gmmvit_deploy.writing import new_folder, sha256_of_file

__all__ = ["Repository", "repository_from_bundle"]

_TEMPLATES = Path(__file__).parent / "triton_models"
_OPENVINO = "gmmvit_openvino"  # a package in the network's folder, whose files import each other by their places


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """path: what ``tritonserver --model-repository`` takes.  models: names, the callable one first."""

    path: Path
    models: tuple[str, ...]
    skipped: tuple[str, ...]


def repository_from_bundle(
    bundle: Bundle,
    out: Path,
    options: RepositoryOptions | None = None,
    *,
    engine: Engine | None = None,
    server: ServerTensorRT | None = None,
    notes: Mapping[str, str] | None = None,
    force: bool = False,
) -> Repository:
    """Write the network, its preprocessing and the ensemble of the two.

    engine: built from this bundle, for the tensorrt backend.  server: whose TensorRT is to load it.
    notes: file name → text, put beside the models; Triton does not look at files there.
    Errors: RepositoryError when the tensorrt backend is asked for without an engine, or with one that
    the server would not load; EngineError when the engine is another bundle's; OutputError.
    """
    options = options or RepositoryOptions()
    source, target = _network_file(bundle, options, engine, server)
    configs = model_configs(bundle, options, engine.card if engine else None)
    with new_folder(out, force=force) as folder:
        for name, config in configs.items():
            model = folder / name
            (model / "1").mkdir(parents=True)
            (model / "config.pbtxt").write_text(config_text(config), encoding="utf-8")
            if any(output.label_filename for output in config.output):
                shutil.copyfile(bundle.path / BUNDLE_LABELS_FILE, model / LABELS_FILE)
        shutil.copyfile(source, folder / options.network / "1" / target)
        if options.backend == "python":
            shutil.copyfile(_TEMPLATES / "network_model.py", folder / options.network / "1" / "model.py")
            _copy_programs(options, folder / options.network / "1", source)
        if options.preprocess in configs:
            _write_preprocess(folder / options.preprocess, bundle)
        for name, text in (notes or {}).items():
            (folder / name).write_text(text, encoding="utf-8")
    ordered = [name for name in (options.name, options.network, options.preprocess) if name in configs]
    skipped = () if options.preprocess in configs else (_NO_PREPROCESSING,)
    return Repository(path=out, models=tuple(ordered), skipped=skipped)


_NO_PREPROCESSING = (
    "no model takes encoded images: the bundle does not say how they are normalised; "
    "export with --dataset or --mean --std to get one"
)


def _network_file(
    bundle: Bundle, options: RepositoryOptions, engine: Engine | None, server: ServerTensorRT | None
) -> tuple[Path, str]:
    if options.backend != "tensorrt":
        if engine is not None:
            raise RepositoryError(f"an engine goes with --backend tensorrt, not {options.backend}")
        precision = graph_precision(options.precision) if options.runtime == "openvino" else options.precision
        return open_variant(bundle, precision).path, "model.onnx"
    if engine is None:
        raise RepositoryError(
            f"{bundle.path}: the tensorrt backend needs an engine",
            hint=f"on the GPU that will serve: gmmvit build {bundle.path} --flavor tensorrt, then --engine",
        )
    require_bundle(bundle, engine)
    if reason := loads_on(engine.card, server or server_tensorrt()):
        raise RepositoryError(
            f"{engine.path}: {reason}", hint="gmmvit doctor BUNDLE --server-version says this in advance"
        )
    if not any(profile.least == 1 for profile in engine.card.profiles):
        raise RepositoryError(
            f"{engine.path}: no profile of it holds a batch of 1, which Triton's batcher may send",
            hint=f"build it with --batch 1:8:{engine.card.max_batch}",
        )
    return engine.plan_path, "model.plan"


def _copy_programs(options: RepositoryOptions, folder: Path, network: Path) -> None:
    """The very files that our runners are made of: one implementation, in process and served."""
    if options.runtime == "onnxruntime":
        copies = {str(onnxruntime_program.__file__): "gmmvit_onnxruntime.py"}
        fused, _ = fused_graph(network)
        if fused is not None:
            (folder / f"fused-{sha256_of_file(network)[:16]}.onnx").write_bytes(fused.graph)
            copies[str(fused.library)] = "onnxruntime_kernels.so"
    else:
        (folder / _OPENVINO).mkdir()
        modules = (openvino_program, openvino_kernels, openvino_view, matcher, prepared_masks)
        files = [module.__file__ for module in modules]
        copies = {str(file): f"{_OPENVINO}/{Path(str(file)).name}" for file in files}
        library, _ = openvino_library()
        if library is not None:
            copies[str(library)] = "openvino_kernels.so"
    for source, name in copies.items():
        shutil.copyfile(source, folder / name)


def _write_preprocess(model: Path, bundle: Bundle) -> None:
    import numpy as np

    shutil.copyfile(_TEMPLATES / "preprocess_model.py", model / "1" / "model.py")
    # The very file that export and parity use: one implementation, wherever an image is decoded.
    shutil.copyfile(str(gmmvit_deploy.preprocess.__file__), model / "1" / "gmmvit_preprocess.py")
    encoded = io.BytesIO()
    image_from_pixels(np.full(bundle.manifest.image.pixels_shape, 128, np.uint8)).save(encoded, "PNG")
    (model / "warmup").mkdir()
    (model / "warmup" / WARMUP_FILE).write_bytes(struct.pack("<I", encoded.tell()) + encoded.getvalue())
