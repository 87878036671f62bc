"""Trained model → the same function with plain constants where it had computations.

P = softmax(S ∘ M + B) V        S = Q Kᵀ; M and B constant
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from gmmvit_deploy.folding.passes import PASSES, attentions
from gmmvit_deploy.models.vit import ViT

__all__ = ["FoldedMask", "FoldedModel", "fold"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoldedMask:
    """layer: name of the attention.  trained: M as the trained module multiplies by it.

    constant: what the folded model multiplies the raw scores by.
    """

    layer: str
    trained: Tensor
    constant: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoldedModel:
    """model: a new module, its weights shared with nothing.  passes: pass → modules it changed."""

    model: ViT
    passes: dict[str, tuple[str, ...]]
    masks: tuple[FoldedMask, ...]


@torch.no_grad()
def fold(model: ViT) -> FoldedModel:
    """Run every pass on a copy of ``model``, which itself stays as it is.

    Folding a folded model gives the same model and an empty list for every pass.
    Errors: FoldError when a pass cannot start or cannot prove its end.
    """
    folded = copy.deepcopy(model).requires_grad_(False)
    trained = {name: a.mask.matrix().detach().clone() for name, a in attentions(model) if a.mask is not None}
    passes = {run.__name__: run(folded) for run in PASSES}
    masks = tuple(
        FoldedMask(layer=name, trained=trained[name], constant=attention.mask.matrix().clone())
        for name, attention in attentions(folded)
        if attention.mask is not None
    )
    return FoldedModel(model=folded, passes=passes, masks=masks)
