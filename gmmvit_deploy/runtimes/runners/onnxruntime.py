"""Run a graph of the bundle in ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.errors import BundleError, RunnerUnavailableError
from gmmvit_deploy.runtimes.programs.onnxruntime import ONNXRUNTIME_PRECISIONS, program_from_onnx
from gmmvit_deploy.runtimes.runners.inspection import inspectable_in_onnxruntime
from gmmvit_deploy.runtimes.runners.runner import Inspection, Runner

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gmmvit_deploy.bundle.artifacts import Bundle
    from gmmvit_deploy.bundle.variants import Variant

__all__ = ["OnnxRuntimeRunner", "SessionRunner"]


class SessionRunner(Runner):
    """Runs a graph of a bundle with a program in ONNX Runtime.  Abstract."""

    runtime = "ONNX Runtime"
    graph: Variant
    _program: Any

    def _run(self, batch: NDArray[Any]) -> NDArray[Any]:
        logits: NDArray[Any] = self._computed(self._program.run, batch)
        return logits

    def _run_all(self, batch: NDArray[Any]) -> Sequence[NDArray[Any]]:
        answers: Sequence[NDArray[Any]] = self._computed(self._program.answers, batch)
        return answers

    def _computed(self, run: Callable[[NDArray[Any]], Any], batch: NDArray[Any]) -> Any:
        try:
            return run(batch)
        # ONNX Runtime raises a dozen unrelated exception classes, for example for a tensor of a terabyte.
        except Exception as exc:
            raise BundleError(f"{self.graph.path}: ONNX Runtime cannot compute this graph: {exc}") from exc


class OnnxRuntimeRunner(SessionRunner):
    """Runs ``model.onnx`` of a bundle, or the bundle's graph in another precision."""

    name = "onnxruntime"

    def __init__(
        self,
        bundle: Bundle,
        *,
        variant: Variant | None = None,
        threads: int = 0,
        chunk: int = 0,
    ) -> None:
        """Load a graph.

        variant: the graph; None loads the float32 graph.  threads: number of threads; 0 uses a thread per core.
        chunk: the maximum number of images that a core computes at once; 0 uses the default of `OnnxRuntimeProgram`.
        Errors: RunnerUnavailableError when ONNX Runtime does not support the precision on a CPU.
        BundleError when ONNX Runtime cannot load the graph.
        """
        super().__init__(bundle)
        self.graph = variant or open_variant(bundle, "fp32")
        self.precision = self.graph.precision
        if self.precision not in ONNXRUNTIME_PRECISIONS:
            raise RunnerUnavailableError(
                f"runner {self.name}: ONNX Runtime computes in {', '.join(ONNXRUNTIME_PRECISIONS)} on a CPU, "
                f"not in {self.precision}"
            )
        self._program = program_from_onnx(self.graph.path, threads=threads, chunk=chunk)

    @property
    def settings(self) -> dict[str, str]:
        return {"threads": str(self._program.threads), "rows at once on a core": str(self._program.chunk)}

    def _program_provenance(self) -> dict[str, str]:
        return {"graph": self.graph.path.name, "graph SHA-256": self.graph.sha256}

    def inspectable(self) -> Inspection:
        """Return the graph that runs."""
        import onnx

        return Inspection(inspectable_in_onnxruntime(self.graph.path.name, onnx.load(self.graph.path)), "")
