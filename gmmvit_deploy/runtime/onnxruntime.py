"""ONNX Runtime on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import BundleError
from gmmvit_deploy.extras import require
from gmmvit_deploy.runtime.onnxruntime_program import ROWS_A_CORE, OnnxRuntimeProgram
from gmmvit_deploy.runtime.runner import Runner

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gmmvit_deploy.artifacts import Bundle
    from gmmvit_deploy.variants import Variant

__all__ = ["OnnxRuntimeRunner", "program_from_onnx", "session_from_bytes", "session_from_onnx"]


def program_from_onnx(path: Path, *, threads: int = 0) -> OnnxRuntimeProgram:
    """A network that runs its batches in chunks, one a core.

    threads: 0 is one a core.  Errors: as `session_from_onnx`.
    """
    return OnnxRuntimeProgram(lambda number: session_from_onnx(path, threads=number), threads=threads)


def session_from_onnx(path: Path, *, threads: int | None = None) -> Any:
    """An ``onnxruntime.InferenceSession`` on the CPU provider.

    threads: of one operator; None leaves it to ONNX Runtime (one a core).
    Errors: MissingDependencyError; BundleError when ONNX Runtime cannot load the graph.
    """
    return _session(str(path), str(path), threads)


def session_from_bytes(graph: bytes, name: str, *, exact: bool = False) -> Any:
    """As `session_from_onnx`, for a serialised graph that errors shall call ``name``.

    exact: no optimisation, so that every rounding the graph asks for takes place.
    """
    return _session(graph, name, None, exact=exact)


def _session(graph: str | bytes, name: str, threads: int | None, *, exact: bool = False) -> Any:
    onnxruntime = require("onnxruntime", package="onnxruntime", extra="cpu")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors; warnings at load are about optimisations, not answers
    if exact:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    # ONNX Runtime raises a dozen unrelated classes for a graph it cannot take.
    except Exception as exc:
        raise BundleError(f"{name}: ONNX Runtime {onnxruntime.__version__} cannot load it: {exc}") from exc


class OnnxRuntimeRunner(Runner):
    """``model.onnx`` of a bundle in ONNX Runtime, or one of its other precisions."""

    name = "onnxruntime"

    def __init__(self, bundle: Bundle, *, variant: Variant | None = None, threads: int = 0) -> None:
        super().__init__(bundle)
        self.precision = variant.precision if variant else "fp32"
        self._program = program_from_onnx(variant.path if variant else bundle.onnx_path, threads=threads)

    @property
    def settings(self) -> dict[str, str]:
        return {"threads": str(self._program.threads), "rows at once on a core": str(ROWS_A_CORE)}

    def _run(self, batch: NDArray[Any]) -> NDArray[Any]:
        logits: NDArray[Any] = self._program.run(batch)
        return logits
