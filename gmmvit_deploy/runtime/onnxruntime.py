"""ONNX Runtime on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import BundleError
from gmmvit_deploy.extras import require
from gmmvit_deploy.runtime.runner import Runner

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gmmvit_deploy.artifacts import Bundle

__all__ = ["OnnxRuntimeRunner", "session_from_onnx"]


def session_from_onnx(path: Path, *, threads: int | None = None) -> Any:
    """An ``onnxruntime.InferenceSession`` on the CPU provider.

    threads: of one operator; None leaves it to ONNX Runtime (one a core).
    Errors: MissingDependencyError; BundleError when ONNX Runtime cannot load the graph.
    """
    onnxruntime = require("onnxruntime", package="onnxruntime", extra="cpu")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors; warnings at load are about optimisations, not answers
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    # ONNX Runtime raises a dozen unrelated classes for a graph it cannot take.
    except Exception as exc:
        raise BundleError(f"{path}: ONNX Runtime {onnxruntime.__version__} cannot load it: {exc}") from exc


class OnnxRuntimeRunner(Runner):
    """``model.onnx`` of a bundle in ONNX Runtime."""

    name = "onnxruntime"

    def __init__(self, bundle: Bundle, *, threads: int | None = None) -> None:
        super().__init__(bundle)
        self._session = session_from_onnx(bundle.onnx_path, threads=threads)
        self._input = bundle.manifest.input_kind

    def _run(self, batch: NDArray[Any]) -> NDArray[Any]:
        logits: NDArray[Any] = self._session.run(["logits"], {self._input: batch})[0]
        return logits
