"""Trained model → the same function with plain constants where it had computations.

P = softmax(M ∘ S + B) V        S = Q Kᵀ; M and B constant
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gmmvit_deploy.folding.cait_passes import merge_layer_scale, merge_scale_into_mixing
from gmmvit_deploy.folding.head_padding import pad_heads
from gmmvit_deploy.folding.last_block import narrow_last_block
from gmmvit_deploy.folding.passes import FoldingPass, fold_biases, fold_masks, masked_scores, merge_scale
from gmmvit_deploy.folding.projections import separate_projections
from gmmvit_deploy.folding.t2t_passes import drop_unused, unfold_as_convolution
from gmmvit_deploy.folding.wide_heads import widen_heads
from gmmvit_deploy.folding.window_passes import join_windows
from gmmvit_deploy.models.attention import MaskedScores
from gmmvit_deploy.models.biases import Bias
from gmmvit_deploy.models.build import Model
from gmmvit_deploy.models.masks import Mask

__all__ = ["ENGINE_PASSES", "PASSES", "QUANTIZED_PASSES", "FoldedConstant", "FoldedModel", "fold", "fold_for_engines"]

PASSES: tuple[FoldingPass, ...] = (
    fold_masks,
    fold_biases,
    merge_scale,
    merge_scale_into_mixing,
    merge_layer_scale,
    unfold_as_convolution,
    drop_unused,
    narrow_last_block,
)
"""In the order in which they run: each may require what an earlier one ensures."""

ENGINE_PASSES: tuple[FoldingPass, ...] = (join_windows, widen_heads, pad_heads)
"""What GPU engines gain by and CPUs do not: the forms that become one fused attention kernel."""

QUANTIZED_PASSES: tuple[FoldingPass, ...] = (*ENGINE_PASSES, separate_projections)
"""And what int8 and fp8 need besides."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoldedConstant:
    """layer: name of the attention.  trained: M, or B, as the trained module uses it.

    constant: what the folded model multiplies the raw scores by, or adds to them.
    """

    layer: str
    trained: Tensor
    constant: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoldedModel:
    """model: a new module, its weights shared with nothing.  passes: pass → what it changed."""

    model: Model
    passes: dict[str, tuple[str, ...]]
    masks: tuple[FoldedConstant, ...]
    biases: tuple[FoldedConstant, ...]


@torch.no_grad()
def fold(model: Model) -> FoldedModel:
    """Run every pass on a copy of ``model``, which itself stays as it is.

    Folding a folded model gives the same model and an empty list for every pass.
    Errors: FoldError when a pass cannot start or cannot prove its end.
    """
    folded = copy.deepcopy(model).requires_grad_(False)
    passes = {run.__name__: run(folded) for run in PASSES}
    return FoldedModel(
        model=folded,
        passes=passes,
        masks=_constants(model, folded, lambda scores: scores.mask),
        biases=_constants(model, folded, lambda scores: scores.bias),
    )


@torch.no_grad()
def fold_for_engines(folded: FoldedModel, passes: Sequence[FoldingPass] = ENGINE_PASSES) -> FoldedModel:
    """Run the passes for GPU engines on a copy of a folded model.

    Errors: FoldError when a pass cannot start or cannot prove its end.
    """
    model = copy.deepcopy(folded.model)
    changed = {run.__name__: run(model) for run in passes}

    def moved(constants: tuple[FoldedConstant, ...], part: str) -> tuple[FoldedConstant, ...]:
        now = {name: getattr(scores, part) for name, scores in masked_scores(model)}
        return tuple(replace(one, constant=now[one.layer].matrix().clone()) for one in constants)

    return FoldedModel(
        model=model,
        passes={**folded.passes, **changed},
        masks=moved(folded.masks, "mask"),
        biases=moved(folded.biases, "bias"),
    )


def _constants(
    model: Model, folded: Model, part: Callable[[MaskedScores], Mask | Bias | None]
) -> tuple[FoldedConstant, ...]:
    """The masks, or the biases, of both models side by side."""
    trained = {name: found.matrix().detach().clone() for name, s in masked_scores(model) if (found := part(s))}
    return tuple(
        FoldedConstant(layer=name, trained=trained[name], constant=found.matrix().clone())
        for name, scores in masked_scores(folded)
        if (found := part(scores))
    )
