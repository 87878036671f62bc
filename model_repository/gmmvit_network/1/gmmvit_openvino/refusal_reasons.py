"""Name the reason for which the matcher refuses an attention, from the operators around its softmax.

``gmmvit repository`` copies this file into the folder of a served model, so this file imports no module of this
project.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gmmvit_deploy.runtimes.kernels.graph_view import (
        GraphView,  # not copied with this file: only type checkers read it
    )

__all__ = ["change_after_split", "unknown_step"]


def change_after_split(value: Any, view: GraphView) -> str:
    """Return how Q or K changes between the split into heads and Q Kᵀ: "normalised", "rotated …", or "" if unknown."""
    at = view.plain(view.inputs(value)[0]) if view.kind(value) == "transpose" else value
    if view.kind(at) == "Concat":  # prefix tokens, which are not rotated, beside rotated patch tokens
        at = view.plain(view.inputs(at)[-1])
    operands = [view.plain(operand) for operand in view.inputs(at)] if view.kind(at) == "addition" else []
    factors = [operand for operand in operands if view.kind(operand) == "multiplication"]
    if len(factors) == 2:
        return "rotated by their position"
    # OpenVINO computes LayerNorm as MVN, a multiplication by the weight and an addition of the bias.
    inner = [view.plain(operand) for factor in factors for operand in view.inputs(factor)]
    return "normalised" if {"LayerNormalization", "MVN"} & {view.kind(at), *map(view.kind, inner)} else ""


def unknown_step(value: Any, side: str, view: GraphView) -> str:
    """Return why the operator that computes this value is not part of an attention.  side: "before" or "after"."""
    kind = view.kind(value)
    if kind == "cast":
        return f"a cast stands {side} its softmax, expected the same type throughout the attention"
    if kind in ("multiplication", "addition") and side == "before":
        if all(view.constant(operand) is None for operand in view.inputs(value)):
            return f"the {kind} before its softmax has no constant input, expected a constant mask or bias"
        place = "expected Q Kᵀ, then at most a mask, then at most a bias"
        return f"the {kind} before its softmax is in an unexpected place: {place}"
    if side == "before":
        return f"{kind} stands before its softmax, expected Q Kᵀ, a mask, a bias or head mixing"
    return f"{kind} stands after its softmax, expected head mixing or the matrix product with V"
