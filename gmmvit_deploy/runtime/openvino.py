"""Settings and kernels for OpenVINO on the CPU.  The precision is always explicit, never OpenVINO's default."""

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
"""Precision → type in which OpenVINO computes everything that the graph does not quantise.

For bf16, OpenVINO computes `model.onnx` in bf16: it rounds where its kernels do, not where our own bf16 graph does.
"""

FUSED_ATTENTION: dict[Precision, Arithmetic] = {"fp32": "f32", "bf16": "bf16", "int8": "bf16"}
"""Precision → type in which our attention kernel multiplies. A Q/DQ graph quantises only products with weights; its
attention, which is fp16 in an engine, is bf16 here if the CPU supports bf16, else float32."""


def our_kernels(precision: Precision) -> tuple[Kernels | None, str]:
    """Load our kernels for OpenVINO.

    Returns (kernels for `OpenVinoProgram`, the arithmetic of attention) or (None, the reason why they are unavailable).
    The first call on a machine compiles the kernels, which takes some seconds.
    """
    library, why = openvino_library()
    return (None, why) if library is None else kernels_from(library, FUSED_ATTENTION[precision])


def kernels_for_graph(path: Path, precision: Precision) -> tuple[Kernels | None, str]:
    """Load our kernels as `our_kernels` does; also return (None, the reason) if they compute no part of this graph."""
    kernels, why = our_kernels(precision)
    if kernels is None:
        return None, why
    openvino = require("openvino", package="openvino", extra="openvino")
    try:
        model = openvino.Core().read_model(str(path))
    except RuntimeError as exc:  # compiling the graph reports the error again
        return None, f"{path.name}: OpenVINO {openvino.__version__} cannot read it: {exc}"
    attentions = kernels.describe_attention(model)
    if not kernels.fuse_attention(model) + kernels.fuse_norms(model):
        return None, f"our kernel takes no attention of this graph: {attentions}"
    return kernels, why


def graph_precision(precision: Precision) -> Precision:
    """Return the precision of the bundle's graph that OpenVINO loads to compute in ``precision``: fp32 for bf16."""
    return "fp32" if precision == "bf16" else precision
