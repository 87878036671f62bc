"""OpenVINO on the CPU, in a precision that is always said and never left to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import BundleError, InputError
from gmmvit_deploy.extras import require
from gmmvit_deploy.kernels.libraries import openvino_library
from gmmvit_deploy.kernels.openvino_kernels import Arithmetic, Kernels, kernels_from
from gmmvit_deploy.runtime.openvino_program import CHUNK, Hint, OpenVinoProgram
from gmmvit_deploy.runtime.runner import Runner

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gmmvit_deploy.artifacts import Bundle
    from gmmvit_deploy.precision import Precision
    from gmmvit_deploy.variants import Variant

__all__ = ["FUSED_ATTENTION", "OPENVINO_HINTS", "OpenVinoRunner", "graph_precision", "our_kernels"]

OPENVINO_HINTS: dict[Precision, Hint] = {"fp32": "f32", "bf16": "bf16", "int8": "f32"}
"""Precision → what OpenVINO computes in beside what the graph itself quantises.

bf16 is `model.onnx` computed in bf16: OpenVINO rounds where its kernels do, not where our own bf16 graph says.
"""

FUSED_ATTENTION: dict[Precision, Arithmetic] = {"fp32": "f32", "bf16": "bf16", "int8": "bf16"}
"""Precision → what our own attention kernel multiplies in. A Q/DQ graph quantises products with weights alone, and
its attention is fp16 in an engine: bf16 where the CPU has it, float32 where not."""


def our_kernels(precision: Precision) -> tuple[Kernels | None, str]:
    """(what to give to `OpenVinoProgram`, attention's arithmetic); or (None, why all is left to OpenVINO).

    The first call on a machine compiles them, which takes some seconds.
    """
    library, why = openvino_library()
    return (None, why) if library is None else kernels_from(library, FUSED_ATTENTION[precision])


def graph_precision(precision: Precision) -> Precision:
    """Which of a bundle's graphs OpenVINO is given to compute in this precision: float32's for bf16."""
    return "fp32" if precision == "bf16" else precision


class OpenVinoRunner(Runner):
    """``model.onnx`` of a bundle in float32 or bf16, or its int8 graph."""

    name = "openvino"

    def __init__(self, bundle: Bundle, variant: Variant, *, precision: Precision = "fp32", threads: int = 0) -> None:
        """variant: the graph: int8's own for int8, else fp32's.

        Errors: InputError for a precision that it does not compute in, or this CPU has not; BundleError when it
        cannot load the graph; MissingDependencyError.
        """
        super().__init__(bundle)
        if precision not in OPENVINO_HINTS:
            raise InputError(
                f"runner openvino computes in {', '.join(OPENVINO_HINTS)} on a CPU; {precision} was asked for"
            )
        openvino = require("openvino", package="openvino", extra="openvino")
        self.precision = precision
        self.variant = variant
        self.version = str(openvino.__version__)
        kernels, self._attention = our_kernels(precision)
        try:
            self.program = OpenVinoProgram(
                str(variant.path), hint=OPENVINO_HINTS[precision], threads=threads, kernels=kernels
            )
        # OpenVINO raises RuntimeError for a graph that it cannot take, and for a type that the CPU has not.
        except RuntimeError as exc:
            if "no bf16" in str(exc):
                raise InputError(f"runner openvino: {exc}", hint="fp32 and int8 run on every x86 CPU") from exc
            raise BundleError(f"{variant.path}: OpenVINO {self.version} cannot load it: {exc}") from exc

    @property
    def settings(self) -> dict[str, str]:
        norms = {"norms": f"our own, in chunks of {CHUNK}"} if self.program.fused_norms else {}
        return {
            "threads": str(self.program.threads),
            "rows at once": str(CHUNK),
            "hint": OPENVINO_HINTS[self.precision],
            "attention": f"our own, {self._attention}" if self.program.fused_attentions else "OpenVINO's",
            **norms,
        }

    def _run(self, batch: NDArray[Any]) -> NDArray[Any]:
        logits: NDArray[Any] = self.program.run(batch)
        return logits
