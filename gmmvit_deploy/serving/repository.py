"""Write a Triton model repository from a bundle."""

from __future__ import annotations

import io
import re
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
from gmmvit_deploy.errors import InputError, RepositoryError
from gmmvit_deploy.images import image_from_pixels
from gmmvit_deploy.kernels import matcher, openvino_kernels, openvino_view, prepared_masks
from gmmvit_deploy.kernels.libraries import openvino_library
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.runtime import onnxruntime_program, openvino_program
from gmmvit_deploy.runtime.onnxruntime import FusedGraph, fused_graph
from gmmvit_deploy.runtime.openvino import graph_precision, kernels_for_graph
from gmmvit_deploy.serving.model_configs import (
    LABELS_FILE,
    WARMUP_FILE,
    RepositoryOptions,
    config_text,
    model_configs,
)
from gmmvit_deploy.variants import open_variant
from gmmvit_deploy.writing import new_folder, sha256_of_file

__all__ = ["CpuKernelsUse", "Repository", "repository_from_bundle", "stated_cpu_kernels"]

_TEMPLATES = Path(__file__).parent / "triton_models"
_OPENVINO = "gmmvit_openvino"  # a package in the network's folder, whose files import each other by their places


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuKernelsUse:
    """Whether a network uses our CPU kernels.

    used: the kernels lie beside the network, which runs with them.  why_not: the reason if not used.
    """

    used: bool
    why_not: str = ""

    def __str__(self) -> str:
        return "on" if self.used else f"off: {self.why_not}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A written repository.

    path: the value for ``tritonserver --model-repository``.  models: names; the first is the model that clients call.
    skipped: models that were left out, each with the reason.  cpu_kernels: whether the network uses our kernels.
    """

    path: Path
    models: tuple[str, ...]
    skipped: tuple[str, ...]
    cpu_kernels: CpuKernelsUse


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
    """Write the network, its preprocessing and the ensemble of both.

    engine: built from this bundle, for the tensorrt backend.  server: the server whose TensorRT must load the engine.
    notes: file name → text, written beside the models; Triton ignores files there.
    Errors: RepositoryError when the tensorrt backend has no engine, or an engine that the server would not load;
    EngineError when the engine was built from another bundle; InputError when our kernels are required but not
    available; OutputError.
    """
    options = options or RepositoryOptions()
    on_progress(Progress("check the graph"))
    source, target = _network_file(bundle, options, engine, server)
    on_progress(Progress("find the attentions that the CPU kernels compute"))
    kernels = _kernels(source, options)
    if options.cpu_kernels == "on" and not kernels.use.used:
        raise InputError(
            f"runtime {options.runtime}+kernels cannot run here: {kernels.use.why_not}",
            hint=f"--runtime {options.runtime} runs the same graph in the runtime's own operators",
        )
    on_progress(Progress("write the models"))
    configs = model_configs(bundle, options, engine.card if engine else None, kernels=kernels.use.used)
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
            _copy_programs(options, folder / options.network / "1", source, kernels)
        if options.preprocess in configs:
            _write_preprocess(folder / options.preprocess, bundle)
        for name, text in (notes or {}).items():
            (folder / name).write_text(text, encoding="utf-8")
    ordered = [name for name in (options.name, options.network, options.preprocess) if name in configs]
    skipped = () if options.preprocess in configs else (_NO_PREPROCESSING,)
    return Repository(path=out, models=tuple(ordered), skipped=skipped, cpu_kernels=kernels.use)


def stated_cpu_kernels(repository: Path) -> CpuKernelsUse | None:
    """Return what the networks of a repository state about our CPU kernels; a network with "on" loads only with them.

    Returns None if no network states it, or networks disagree.
    """
    configs = (path.read_text(encoding="utf-8", errors="replace") for path in repository.glob("*/config.pbtxt"))
    stated = {state for config in configs for state in _STATED.findall(config)}
    if len(stated) != 1:
        return None
    if stated == {"on"}:
        return CpuKernelsUse(used=True)
    return CpuKernelsUse(used=False, why_not=f"{repository} was written without our kernels")


_STATED = re.compile(r'key\s*:\s*"cpu_kernels"\s*,?\s*value\s*:?\s*\{\s*string_value\s*:\s*"(on|off)"')
_NO_PREPROCESSING = (
    "no model takes encoded images: the bundle states no mean and std; "
    "export with --dataset or --mean --std to add such a model"
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
            f"{engine.path}: {reason}",
            hint="type gmmvit doctor BUNDLE --server-version RELEASE to check this in advance",
        )
    if not any(profile.least == 1 for profile in engine.card.profiles):
        raise RepositoryError(
            f"{engine.path}: no profile of it holds a batch of 1, which Triton's batcher may send",
            hint=f"build it with --batch 1:8:{engine.card.max_batch}",
        )
    return engine.plan_path, "model.plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernels:
    """library: to copy beside the network; None without kernels.  fused: graph with our kernels, for ONNX Runtime."""

    use: CpuKernelsUse
    library: Path | None = None
    fused: FusedGraph | None = None


def _kernels(network: Path, options: RepositoryOptions) -> _Kernels:
    """Return our kernels for this network, or the reason why it runs without them."""
    if options.backend != "python":
        why = f"the {options.backend} backend runs the network by itself"
        return _Kernels(use=CpuKernelsUse(used=False, why_not=why))
    if options.cpu_kernels == "off":
        return _Kernels(use=CpuKernelsUse(used=False, why_not="not requested"))
    if options.runtime == "onnxruntime":
        fused, why = fused_graph(network)
        if fused is None:
            return _Kernels(use=CpuKernelsUse(used=False, why_not=why))
        return _Kernels(use=CpuKernelsUse(used=True), library=fused.library, fused=fused)
    kernels, why = kernels_for_graph(network, options.precision)
    library, _ = openvino_library()
    if kernels is None or library is None:
        return _Kernels(use=CpuKernelsUse(used=False, why_not=why))
    return _Kernels(use=CpuKernelsUse(used=True), library=library)


def _copy_programs(options: RepositoryOptions, folder: Path, network: Path, kernels: _Kernels) -> None:
    """Copy the source files of our runners, so that the same implementation runs in process and on the server."""
    if options.runtime == "onnxruntime":
        copies = {str(onnxruntime_program.__file__): "gmmvit_onnxruntime.py"}
        if kernels.fused is not None:
            (folder / f"fused-{sha256_of_file(network)[:16]}.onnx").write_bytes(kernels.fused.graph)
    else:
        (folder / _OPENVINO).mkdir()
        modules = (openvino_program, openvino_kernels, openvino_view, matcher, prepared_masks)
        files = [module.__file__ for module in modules]
        copies = {str(file): f"{_OPENVINO}/{Path(str(file)).name}" for file in files}
    if kernels.library is not None:
        copies[str(kernels.library)] = f"{options.runtime}_kernels.so"
    for source, name in copies.items():
        shutil.copyfile(source, folder / name)


def _write_preprocess(model: Path, bundle: Bundle) -> None:
    import numpy as np

    shutil.copyfile(_TEMPLATES / "preprocess_model.py", model / "1" / "model.py")
    # The file that export and parity use too, so that images are decoded the same way everywhere.
    shutil.copyfile(str(gmmvit_deploy.preprocess.__file__), model / "1" / "gmmvit_preprocess.py")
    encoded = io.BytesIO()
    image_from_pixels(np.full(bundle.manifest.image.pixels_shape, 128, np.uint8)).save(encoded, "PNG")
    (model / "warmup").mkdir()
    (model / "warmup" / WARMUP_FILE).write_bytes(struct.pack("<I", encoded.tell()) + encoded.getvalue())
