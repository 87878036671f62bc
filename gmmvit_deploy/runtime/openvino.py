"""OpenVINO on the CPU, in a precision that is always said and never left to it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gmmvit_deploy.extras import require
from gmmvit_deploy.kernels.libraries import openvino_library
from gmmvit_deploy.kernels.openvino_kernels import Arithmetic, Kernels, kernels_from
from gmmvit_deploy.runtime.openvino_program import Hint

if TYPE_CHECKING:
    from gmmvit_deploy.precision import Precision

__all__ = ["FUSED_ATTENTION", "OPENVINO_HINTS", "graph_precision", "kernels_for_graph", "our_kernels"]

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


def kernels_for_graph(path: Path, precision: Precision) -> tuple[Kernels | None, str]:
    """As `our_kernels`; None, with the reason, also where nothing in this graph has a form that they take."""
    kernels, why = our_kernels(precision)
    if kernels is None:
        return None, why
    openvino = require("openvino", package="openvino", extra="openvino")
    try:
        model = openvino.Core().read_model(str(path))
    except RuntimeError as exc:  # what compiles the graph will say what is wrong with it
        return None, f"{path.name}: OpenVINO {openvino.__version__} cannot read it: {exc}"
    attentions = kernels.describe_attention(model)
    if not kernels.fuse_attention(model) + kernels.fuse_norms(model):
        return None, f"none of its attention has the form that our kernel takes: {attentions}"
    return kernels, why


def graph_precision(precision: Precision) -> Precision:
    """Which of a bundle's graphs OpenVINO is given to compute in this precision: float32's for bf16."""
    return "fp32" if precision == "bf16" else precision
