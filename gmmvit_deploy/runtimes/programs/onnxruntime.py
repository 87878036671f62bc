"""Import ONNX Runtime, and run graphs in ONNX Runtime on the CPU.

Two distributions of ONNX Runtime exist: ``onnxruntime`` for CPUs, and ``onnxruntime-gpu`` for GPUs too. Both install
the same files of the package ``onnxruntime``. If both are installed, the files of the last installation remain, and
removing one distribution removes files of the other.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import BundleError, GmmvitError, InputError, MissingDependencyError
from gmmvit_deploy.extras import require
from gmmvit_deploy.files.leftovers import temporary_folder
from gmmvit_deploy.graphs.calibration import Calibration
from gmmvit_deploy.graphs.quantize import activations_of
from gmmvit_deploy.graphs.weights import has_external_weights, write_graph
from gmmvit_deploy.graphs.wiring import end_of_normalisation
from gmmvit_deploy.inference.onnxruntime_program import OnnxRuntimeProgram, session_options

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray


_DISTRIBUTIONS = ("onnxruntime", "onnxruntime-gpu")
_GPU = "pip install 'gmmvit-deploy[gpu]'"
INSTALL_ONNXRUNTIME = f"pip install 'gmmvit-deploy[cpu]', or {_GPU} on a machine with an NVIDIA GPU"
MEND_ONNXRUNTIME = f"pip uninstall -y {' '.join(_DISTRIBUTIONS)}, then {INSTALL_ONNXRUNTIME}"


def require_onnxruntime() -> str:
    """Return distribution and version of the installed ONNX Runtime, without importing it: ``onnxruntime-gpu 1.31.1``.

    Errors: MissingDependencyError when ONNX Runtime is not installed.
    GmmvitError when both distributions are installed.
    """
    there = [f"{name} {number}" for name in _DISTRIBUTIONS if (number := _version(name))]
    if len(there) > 1:
        raise GmmvitError(
            f"{' and '.join(there)} are both installed, and each overwrites files of the other",
            hint=MEND_ONNXRUNTIME,
        )
    if there:
        return there[0]
    if importlib.util.find_spec("onnxruntime") is None:
        raise MissingDependencyError("onnxruntime", extra="cpu", hint=INSTALL_ONNXRUNTIME)
    return "onnxruntime of another distribution"  # such as onnxruntime-openvino, or a build from source


def import_onnxruntime() -> Any:
    """Import ONNX Runtime.  Errors: as `require_onnxruntime`.  GmmvitError when files of the package are missing."""
    name = require_onnxruntime()
    onnxruntime = require("onnxruntime", package="onnxruntime", extra="cpu")
    if not hasattr(onnxruntime, "InferenceSession"):
        raise GmmvitError(f"{name}: files of the package are missing", hint=MEND_ONNXRUNTIME)
    return onnxruntime


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def program_from_onnx(path: Path, *, threads: int = 0) -> OnnxRuntimeProgram:
    """Open a graph as a program that divides large batches into chunks, and runs the chunks in parallel.

    threads: 0 uses a thread per core.  Errors: as `session_from_onnx`.
    """
    return OnnxRuntimeProgram(lambda number: session_from_onnx(path, threads=number), threads=threads)


def session_from_onnx(graph: Path | bytes, name: str = "", *, threads: int | None = None, exact: bool = False) -> Any:
    """Open a graph as an ``onnxruntime.InferenceSession`` on the CPU provider.

    graph: the ONNX file, or the serialised graph.  name: the graph's name in error messages; "" is that of the file.
    threads: the number of threads for an operator. None uses ONNX Runtime's default, a thread per core.
    exact: True to turn optimisation off, so that ONNX Runtime omits no rounding of the graph.
    Errors: as `import_onnxruntime`.  BundleError when ONNX Runtime cannot load the graph.
    """
    onnxruntime = import_onnxruntime()
    try:
        options = session_options(threads)
        if exact:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        stored = graph if isinstance(graph, bytes) else str(graph)
        return onnxruntime.InferenceSession(stored, options, providers=["CPUExecutionProvider"])
    # ONNX Runtime raises a dozen unrelated exception classes for graphs that it cannot load.
    except Exception as exc:
        version = onnxruntime.__version__
        raise BundleError(f"{name or graph!s}: ONNX Runtime {version} cannot load this graph: {exc}") from exc


def session_from_model(model: ir.Model, name: str, *, exact: bool = False) -> Any:
    """Open a graph as `session_from_onnx` does.  A graph with large weights is written to a temporary folder."""
    import onnx_ir as ir

    if not has_external_weights(model):
        return session_from_onnx(ir.to_proto(model).SerializeToString(), name, exact=exact)
    with temporary_folder("graph") as folder:
        write_graph(model, folder / "model.onnx")
        return session_from_onnx(folder / "model.onnx", name, exact=exact)


def with_outputs(model: ir.Model, names: Iterable[str | None]) -> ir.Model:
    """Return a copy of a graph with the named tensors as further outputs; ONNX Runtime infers their types."""
    import onnx_ir as ir

    out = model.clone()
    tensors, outputs = ir.convenience.create_value_mapping(out.graph), out.graph.outputs
    outputs.extend(tensors[name] for name in dict.fromkeys(names) if name and tensors[name] not in outputs)
    return out


def calibrate(model: ir.Model, batches: Iterable[NDArray[Any]], *, moment_rows: int = 0) -> Calibration:
    """Run a float32 graph on ``batches``, and measure the input of each linear map that quantisation changes.

    moment_rows: max rows of each batch from which second moments, with which weights are rounded, are measured too.
    Errors: InputError when there is no image, or a value is not finite.
    BundleError when ONNX Runtime cannot load the graph.
    """
    names = activations_of(model.graph)
    session = session_from_model(with_outputs(model, names), "the graph for calibration")
    (image,) = (value.name for value in model.graph.inputs)
    calibration = Calibration()
    for batch in batches:
        for name, values in zip(names, session.run(list(names), {image: batch}), strict=True):
            calibration.add(name, values, moment_rows=moment_rows)
        calibration.images += len(batch)
    if not calibration.images:
        raise InputError(
            "calibration needs images, got no image", hint="type --calibration and a folder or an .npz of images"
        )
    return calibration


def normalised_in_graph(path: Path, pixels: NDArray[Any]) -> NDArray[Any] | None:
    """Normalise pixels with the nodes of the graph.

    pixels: uint8 (B, height, width, channels).
    Returns float32 (B, channels, height, width), or None if the graph does not normalise.
    """
    import onnx_ir as ir

    model = ir.load(path)
    end = end_of_normalisation(model.graph)
    if end is None:
        return None
    model.graph.outputs[:] = [end]
    session = session_from_model(model, path.name, exact=True)
    tensor: NDArray[Any] = session.run(None, {model.graph.inputs[0].name: pixels})[0]
    return tensor
