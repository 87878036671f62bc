"""CaiT: rewrite talking heads as plain heads of head dim H·d, so that fused GPU kernels can compute the attention.

Talking heads are heads that are mixed before and after softmax by the (H, H) matrices pre and post. If all H heads
share a mask M, head mixing before softmax can move into Q, and head mixing after softmax can move into V. In the
formulas Q_k, K_k and V_k belong to head k, A_h is softmax of the mixed scores of head h, and g is a head of the output:

    Σ_k pre[k,h] · M ∘ (Q_k K_kᵀ)   =  M ∘ (Q̃_h K̃ᵀ)    Q̃_h = [pre[0,h]·Q_0, …],  K̃ = [K_0, K_1, …]
    Σ_h post[h,g] · A_h V_g         =  (Σ_h A_h Ṽ_h)_g   Ṽ_h = [post[h,0]·V_0, …]

The algebra is exact; only the order of the sums changes. The matrix products Q̃ K̃ᵀ and A Ṽ take H times the work of the
original products. This work is small compared with the projections, but the rewrite helps only if fused GPU kernels
support head dim H·d. If each head k has a separate mask M_k, the rewrite is not possible, because M_k is inside the sum
over k. Masks of matrix rank R could be merged into Q and K, but the head dim would be R·H·d. For the released models,
with H·d = 256, this head dim is too large for fused kernels if R > 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.families.cait.model import TalkingHeadsAttention
from gmmvit_deploy.layers.attention import projected
from gmmvit_deploy.layers.head_dims import LARGEST_FUSED
from gmmvit_deploy.precision import Role
from gmmvit_deploy.scores.attention import AttentionScores
from gmmvit_deploy.scores.step import Step

__all__ = ["WideHeadsAttention", "widen_heads"]


class WideHeadsAttention(nn.Module):
    """`TalkingHeadsAttention` rewritten without head mixing: H heads with head dim H·d each.

    queries, keys, values: the factors (H, 1, H·d) by which each head multiplies the projections for Q, K and V. All
    elements of ``keys`` are 1. The factors ``keys`` exist because fused kernels require a separate K for each head.
    """

    operator_roles: ClassVar[Mapping[str, Role]] = {
        "softmax": "softmax",
        "matmul": "product",
        "mul": "mixing",
        "sum": "mixing",
    }

    stacked_projection: ClassVar[tuple[str, int]] = ("key_value", 2)
    queries: Tensor
    keys: Tensor
    values: Tensor

    def __init__(self, talking: TalkingHeadsAttention) -> None:
        super().__init__()
        heads = talking.heads
        head_dim = talking.query.out_features // heads
        self.query, self.key_value, self.out = talking.query, talking.key_value, talking.out
        *factors, (_, mix_before) = talking.scores.steps_before()
        ((_, mix_after),) = talking.scores.steps_after()
        self.scores = AttentionScores({name.removeprefix("before."): step for name, step in factors})
        spread = [
            mixing.detach().repeat_interleave(head_dim, dim=1).unsqueeze(1)
            for mixing in (mix_before.matrix().transpose(0, 1), mix_after.matrix())
        ]
        self.register_buffer("queries", spread[0].clone())
        self.register_buffer("keys", torch.ones_like(spread[0]))
        self.register_buffer("values", spread[1].clone())

    def forward(self, x: Float[Tensor, "batch i dim"], context: Tensor) -> Float[Tensor, "batch i dim"]:
        query = self.query(x).unsqueeze(1) * self.queries
        key, value = (part.unsqueeze(1) for part in projected(self.key_value, context, 2))
        weights = self.scores.weights(query, key * self.keys)
        out: Tensor = self.out((weights @ (value * self.values)).sum(dim=1))
        return out


@torch.no_grad()
def widen_heads(model: nn.Module) -> tuple[str, ...]:
    """Rewrite talking heads as heads of head dim H·d (wide heads).

    Unchanged: attentions whose heads have different masks, and attentions with a head dim H·d above `LARGEST_FUSED`.
    Requires: every step on the scores is folded, which means replaced by a constant; the scale is merged into the mask
    or into the head mixing.
    Ensures: on random tokens the new and the old attention output the same values, up to float64 rounding.
    Returns the names of the changed attentions.
    Errors: FoldError when a requirement does not hold, or when the outputs differ.
    """
    changed = []
    for name, parent in list(model.named_modules()):
        for child, attention in list(parent.named_children()):
            if not isinstance(attention, TalkingHeadsAttention) or attention.query.out_features > LARGEST_FUSED:
                continue
            if _widens(f"{name}.{child}", attention.scores):
                wide = WideHeadsAttention(attention)
                _require_equal(f"{name}.{child}", attention, wide)
                setattr(parent, child, wide)
                changed.append(f"{name}.{child}")
    return tuple(changed)


def _widens(name: str, scores: AttentionScores) -> bool:
    """Return True if the steps are factors shared by all heads, then head mixing, then softmax, then head mixing.

    The factors are steps that multiply the scores, such as a mask.
    Errors: FoldError when a factor is not folded, or when the scale is not merged into another step.
    """
    before = [step for _, step in scores.steps_before()]
    after = [step for _, step in scores.steps_after()]
    if [step.operation for step in after] != ["mix"] or not before or before[-1].operation != "mix":
        return False
    factors = before[:-1]
    if not all(step.is_constant for step in factors):
        raise FoldError(f"{name}: run the folding passes before widen_heads, which needs constant steps on the scores")
    if not all(step.operation == "multiply" and _same_for_all_heads(step) for step in factors):
        return False
    if any(step.role == "scale" for step in factors):
        raise FoldError(
            f"{name}: run merge_scale and merge_scale_into_mixing before widen_heads, which accepts no scale"
        )
    return True


def _same_for_all_heads(step: Step) -> bool:
    constant = step.matrix()
    return constant.dim() < 3 or bool((constant == constant[:1]).all())


def _require_equal(name: str, talking: TalkingHeadsAttention, wide: WideHeadsAttention) -> None:
    masks = [step.matrix() for _, step in wide.scores.steps()]
    tokens = masks[0].shape[-1] if masks else 3
    x = torch.randn(
        2, tokens, talking.query.in_features, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    old, new = talking.double()(x, x), wide.double()(x, x)
    talking.float()
    wide.float()
    if not torch.allclose(new, old, rtol=1e-9, atol=1e-9):
        raise FoldError(f"{name}: widen_heads changed the output of this attention")
