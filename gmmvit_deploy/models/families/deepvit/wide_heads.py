"""DeepViT: rewrite Re-attention as plain heads of head dim H·d, so that fused GPU kernels can compute the attention.

Heads are mixed only after softmax: `layers.wide_heads` with the identity as mixing before softmax. The offset of the
new heads stays a mean over the tokens of V, and is added after the attention. In the presets, H·d is the dim of 384 to
420, larger than the largest head dim with a fused kernel; their attentions stay unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.families.deepvit.model import ReAttention
from gmmvit_deploy.models.layers.attention import projected
from gmmvit_deploy.models.layers.head_dims import LARGEST_FUSED
from gmmvit_deploy.models.layers.wide_heads import WideHeads, same_for_all_heads
from gmmvit_deploy.models.scores.attention import AttentionScores
from gmmvit_deploy.precision import Role

__all__ = ["WideReAttention", "widen_reattention"]


class WideReAttention(WideHeads):
    """`ReAttention` rewritten without head mixing: H heads with head dim H·d each.

    mean_factors: f, (H·d), the factor of each feature for the mean over the tokens of V; None without an offset.
    """

    operator_roles: ClassVar[Mapping[str, Role]] = {**WideHeads.operator_roles, "mean": "pooling", "add": "residual"}
    qkv: nn.Module
    stacked_projection: ClassVar[tuple[str, int]] = ("qkv", 3)
    mean_factors: Tensor | None

    def __init__(self, mixed: ReAttention, head_dim: int) -> None:
        ((_, mix_after),) = mixed.scores.steps_after()
        after = mix_after.matrix().detach()
        super().__init__(
            AttentionScores({name.removeprefix("before."): step for name, step in mixed.scores.steps_before()}),
            before=torch.eye(mixed.heads, dtype=after.dtype),
            after=after,
            head_dim=head_dim,
        )
        self.qkv, self.out = mixed.qkv, mixed.out
        factors = None if mixed.mean_factors is None else mixed.mean_factors.repeat_interleave(head_dim, dim=0)[:, 0]
        self.register_buffer("mean_factors", factors)

    def forward(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch n dim"]:
        query, key, value = projected(self.qkv, x, 3)
        mixed = self.attended(query, key, value)
        if self.mean_factors is not None:
            mixed = mixed + value.mean(dim=-2, keepdim=True) * self.mean_factors
        out: Tensor = self.out(mixed)
        return out


@torch.no_grad()
def widen_reattention(model: nn.Module) -> tuple[str, ...]:
    """Rewrite Re-attention as heads of head dim H·d (wide heads).

    Unchanged: attentions without head mixing, and attentions with a head dim H·d above `LARGEST_FUSED`.
    Requires: `folding.merge_head_norm` ran, so that the head mixing is the only step after softmax.
    Ensures: on random tokens the new and the old attention output the same values, up to float64 rounding.
    Returns the names of the changed attentions.
    Errors: FoldError when a requirement does not hold, or when the outputs differ.
    """
    changed = []
    for name, parent in list(model.named_modules()):
        for child, attention in list(parent.named_children()):
            if not isinstance(attention, ReAttention) or not len(attention.scores.after):
                continue
            if not isinstance(attention.out, nn.Linear) or attention.out.in_features > LARGEST_FUSED:
                continue
            path = f"{name}.{child}"
            _require_folded(path, attention)
            wide = WideReAttention(attention, attention.out.in_features // attention.heads)
            _require_equal(path, attention, wide)
            setattr(parent, child, wide)
            changed.append(path)
    return tuple(changed)


def _require_folded(name: str, attention: ReAttention) -> None:
    if [step.operation for _, step in attention.scores.steps_after()] != ["mix"]:
        raise FoldError(f"{name}: run merge_head_norm before widen_reattention, which needs head mixing without a norm")
    before = [step for _, step in attention.scores.steps_before()]
    if not all(step.is_constant and step.operation == "multiply" and same_for_all_heads(step) for step in before):
        raise FoldError(f"{name}: widen_reattention needs constant factors before softmax that all heads share")


def _require_equal(name: str, mixed: ReAttention, wide: WideReAttention) -> None:
    generator = torch.Generator().manual_seed(0)
    width = cast("nn.Linear", mixed.out).out_features
    x = torch.randn(2, 3, width, dtype=torch.float64, generator=generator)
    old, new = copy.deepcopy(mixed).double()(x), copy.deepcopy(wide).double()(x)
    if not torch.allclose(new, old, rtol=1e-9, atol=1e-9):
        raise FoldError(f"{name}: widen_reattention changed the output of this attention")
