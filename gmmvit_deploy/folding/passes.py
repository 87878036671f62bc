"""Folding passes: each turns a computation that does not depend on the input into a constant.

A pass is a function ``(model) -> names of what it changed``. It states what it requires, what it
does and what it ensures, and proves the last before it returns. Run again, it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.attention import MaskedAttention
from gmmvit_deploy.models.masks import ConstantMask

__all__ = ["PASSES", "FoldingPass", "attentions", "fold_masks", "merge_scale"]

FoldingPass = Callable[[nn.Module], tuple[str, ...]]


def attentions(model: nn.Module) -> Iterator[tuple[str, MaskedAttention]]:
    """(name, module) of every attention that may carry a mask."""
    for name, module in model.named_modules():
        if isinstance(module, MaskedAttention):
            yield name, module


@torch.no_grad()
def fold_masks(model: nn.Module) -> tuple[str, ...]:
    """M = Σ_k α_k · base ** (1/(σ_k²+ε)), or E, or the closed form  →  the same M, stored.

    Requires: evaluation mode; float32 (in half precision the base flushes to zero before it is
    raised to its power); a finite matrix.
    Ensures: every mask is a `ConstantMask`, bit for bit what the trained module multiplies by; no
    parameter of a mask is left.
    """
    changed = []
    for name, attention in attentions(model):
        mask = attention.mask
        if mask is None or isinstance(mask, ConstantMask):
            continue
        if model.training:
            raise FoldError("the model is in training mode; folding is for inference", hint="call model.eval()")
        state = [*mask.parameters(), *mask.buffers()]
        if any(tensor.dtype != torch.float32 for tensor in state):
            raise FoldError(f"{name}: its mask is not float32; fold first, cast second")
        matrix = mask.matrix().detach().clone()
        if not bool(matrix.isfinite().all()):
            raise FoldError(f"{name}: its mask has NaN or infinite entries")
        attention.mask = ConstantMask(matrix)
        if not attention.mask.matrix().equal(mask.matrix()):
            raise FoldError(f"{name}: the folded mask is not the trained one, bit for bit")
        changed.append(name)
    unfolded = [name for name, attention in attentions(model) if not isinstance(attention.mask, ConstantMask | None)]
    learned = [f"{name}.mask" for name, attention in attentions(model) if _has_parameters(attention.mask)]
    if unfolded or learned:
        raise FoldError(f"not folded: {', '.join(unfolded + learned)}")
    return tuple(changed)


@torch.no_grad()
def merge_scale(model: nn.Module) -> tuple[str, ...]:
    """M ∘ (S · d^(−1/2))  →  (M · d^(−1/2)) ∘ S.

    Requires: folded masks. A plain attention keeps its scalar: it has no constant to merge it into.
    Ensures: a masked attention multiplies its raw scores Q Kᵀ once, by one constant.
    """
    changed = []
    for name, attention in attentions(model):
        if attention.mask is None or attention.scale is None:
            continue
        if not isinstance(attention.mask, ConstantMask):
            raise FoldError(f"{name}: its mask is not folded yet, so its scale cannot be merged into it")
        attention.mask = ConstantMask(attention.mask.constant * attention.scale)
        attention.scale = None
        changed.append(name)
    left = [name for name, attention in attentions(model) if attention.mask is not None and attention.scale is not None]
    if left:
        raise FoldError(f"the scale is still applied on its own in: {', '.join(left)}")
    return tuple(changed)


def _has_parameters(mask: nn.Module | None) -> bool:
    return mask is not None and any(True for _ in mask.parameters())


PASSES: tuple[FoldingPass, ...] = (fold_masks, merge_scale)
"""In the order in which they run: each may require what an earlier one ensures."""
