"""Folding passes on attention scores: what does not depend on the input becomes a constant.

A pass is a function ``(model) -> names of what it changed``. It states what it requires, what it
does and what it ensures, and proves the last before it returns. Run again, it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.attention import MaskedScores
from gmmvit_deploy.models.biases import Bias, ConstantBias
from gmmvit_deploy.models.masks import ConstantMask, Mask

__all__ = ["FoldingPass", "fold_biases", "fold_masks", "masked_scores", "merge_scale"]

FoldingPass = Callable[[nn.Module], tuple[str, ...]]


def masked_scores(model: nn.Module) -> Iterator[tuple[str, MaskedScores]]:
    """(name of the attention, its scores) for every attention of any family."""
    for name, module in model.named_modules():
        if isinstance(module, MaskedScores):
            yield name.removesuffix(".scores"), module


@torch.no_grad()
def fold_masks(model: nn.Module) -> tuple[str, ...]:
    """M = Σ_k α_k · base ** (1/(σ_k²+ε)), or E, or the closed form, padded or not  →  the same M, stored.

    Requires: evaluation mode; float32 (in half precision the base flushes to zero before it is
    raised to its power); a finite matrix.
    Ensures: every mask is a `ConstantMask`, bit for bit what the trained module multiplies by; no
    parameter of a mask is left.
    """
    return _fold_part(model, "mask", ConstantMask)


@torch.no_grad()
def fold_biases(model: nn.Module) -> tuple[str, ...]:
    """B = table[index] + shift mask  →  the same B, stored: nothing is gathered at run time.

    Requires and ensures: as `fold_masks`.
    """
    return _fold_part(model, "bias", ConstantBias)


@torch.no_grad()
def merge_scale(model: nn.Module) -> tuple[str, ...]:
    """M ∘ (S · d^(−1/2))  →  (M · d^(−1/2)) ∘ S.

    Requires: folded masks. A plain attention keeps its scalar: it has no constant to merge it into.
    Ensures: a masked attention multiplies its raw scores Q Kᵀ once, by one constant.
    """
    changed = []
    for name, scores in masked_scores(model):
        if scores.mask is None or scores.scale is None:
            continue
        if not isinstance(scores.mask, ConstantMask):
            raise FoldError(f"{name}: its mask is not folded yet, so its scale cannot be merged into it")
        scores.mask = ConstantMask(scores.mask.constant * scores.scale)
        scores.scale = None
        changed.append(name)
    left = [name for name, scores in masked_scores(model) if scores.mask is not None and scores.scale is not None]
    if left:
        raise FoldError(f"the scale is still applied on its own in: {', '.join(left)}")
    return tuple(changed)


def _fold_part(
    model: nn.Module, part: Literal["mask", "bias"], constant: type[ConstantMask] | type[ConstantBias]
) -> tuple[str, ...]:
    """Replace the mask, or the bias, of every attention by what its ``matrix()`` gives; prove it."""
    changed = []
    for name, scores in masked_scores(model):
        trained: Mask | Bias | None = getattr(scores, part)
        if trained is None or isinstance(trained, constant):
            continue
        folded = constant(_stored(name, part, trained, training=model.training))
        if not folded.constant.equal(trained.matrix()):
            raise FoldError(f"{name}: the folded {part} is not the trained one, bit for bit")
        setattr(scores, part, folded)
        changed.append(name)
    left = [
        name
        for name, scores in masked_scores(model)
        if (found := getattr(scores, part)) is not None
        and (not isinstance(found, constant) or any(True for _ in found.parameters()))
    ]
    if left:
        raise FoldError(f"not folded: {', '.join(left)}")
    return tuple(changed)


def _stored(name: str, what: str, module: Mask | Bias, *, training: bool) -> torch.Tensor:
    """What ``module.matrix()`` computes, as a tensor of its own."""
    if training:
        raise FoldError("the model is in training mode; folding is for inference", hint="call model.eval()")
    state = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point()]
    if any(tensor.dtype != torch.float32 for tensor in state):
        raise FoldError(f"{name}: its {what} is not float32; fold first, cast second")
    matrix = module.matrix().detach().clone()
    if not bool(matrix.isfinite().all()):
        raise FoldError(f"{name}: its {what} has NaN or infinite entries")
    return matrix
