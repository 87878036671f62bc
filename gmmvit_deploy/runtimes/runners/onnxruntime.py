"""Run a graph of the bundle in ONNX Runtime on the CPU, unchanged or with this project's attention kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.errors import BundleError, RunnerUnavailableError
from gmmvit_deploy.files.writing import sha256_of_bytes, sha256_of_file
from gmmvit_deploy.runtimes.kernels.libraries import origin_of
from gmmvit_deploy.runtimes.programs.onnxruntime import (
    ONNXRUNTIME_PRECISIONS,
    fused_graph,
    program_from_onnx,
    session_from_bytes,
)
from gmmvit_deploy.runtimes.programs.onnxruntime_program import instruction_set_of
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
    """Runs ``model.onnx`` of a bundle, or the bundle's graph in another precision.

    ``onnxruntime`` runs the graph with ONNX Runtime's built-in operators. ``onnxruntime+kernels`` runs a copy of the
    graph in which an operator of this project computes attention.
    """

    name = "onnxruntime"

    def __init__(
        self,
        bundle: Bundle,
        *,
        variant: Variant | None = None,
        threads: int = 0,
        chunk: int = 0,
        kernels: bool = False,
    ) -> None:
        """Load a graph.

        variant: the graph; None loads the float32 graph.  threads: number of threads; 0 uses a thread per core.
        chunk: the maximum number of images that a core computes at once; 0 uses the default of `OnnxRuntimeProgram`.
        kernels: True to use this project's CPU kernels.
        Errors: RunnerUnavailableError when ONNX Runtime does not support the precision on a CPU, or when ``kernels`` is
        True and this project's CPU kernels are not available.
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
        self._fused = None
        if kernels:
            self.name = "onnxruntime+kernels"
            self.own_kernels = True
            self._fused, why = fused_graph(self.graph.path)
            if self._fused is None:
                raise RunnerUnavailableError(
                    f"runner {self.label} cannot run here: {why}",
                    hint="type --runner onnxruntime to run the same graph with ONNX Runtime's operators, without this "
                    "project's kernels",
                )
        self._program = program_from_onnx(self.graph.path, threads=threads, chunk=chunk, fused=self._fused)

    @property
    def settings(self) -> dict[str, str]:
        return {
            "threads": str(self._program.threads),
            "rows at once on a core": str(self._program.chunk),
            "attention": "our own, f32" if self._fused else "ONNX Runtime's",
            **self._kernel_settings(),
        }

    def _kernel_settings(self) -> dict[str, str]:
        if self._fused is None:
            return {}
        return {
            "attentions in our kernel": self._fused.attentions,
            "instruction set of our kernel": instruction_set_of(self._fused.library),
            "library of our kernel": origin_of(self._fused.library).partition(":")[0].partition(" to ")[0],
        }

    def _program_provenance(self) -> dict[str, str]:
        file = self.graph.path.name
        if self._fused is None:
            return {"graph": file, "graph SHA-256": self.graph.sha256}
        return {
            "graph": f"{file} with our kernels",
            "graph SHA-256": sha256_of_bytes(self._fused.graph),
            "made from": file,
            "made from SHA-256": self.graph.sha256,
            "kernels SHA-256": sha256_of_file(self._fused.library),
        }

    def inspectable(self) -> Inspection:
        """Return the graph that runs, including this project's operators."""
        import onnx

        if self._fused is None:
            return Inspection(inspectable_in_onnxruntime(self.graph.path.name, onnx.load(self.graph.path)), "")
        open_session = partial(session_from_bytes, library=self._fused.library)
        proto = onnx.load_from_string(self._fused.graph)
        return Inspection(
            inspectable_in_onnxruntime(f"{self.graph.path.name} with our kernels", proto, open_session), ""
        )
