"""Attention without head mixing, from an attention that mixes heads: heads of head dim H·d (wide heads).

In the formulas Q_k, K_k and V_k belong to head k, A_h is softmax of the mixed scores of head h, and g is a head of the
output. ``before`` and ``after`` are the (H, H) matrices that mix the heads before and after softmax, indexed
[old head, new head]:

    Σ_k before[k,h] · M ∘ (Q_k K_kᵀ)  =  M ∘ (Q̃_h K̃ᵀ)    Q̃_h = [before[0,h]·Q_0, …],  K̃ = [K_0, K_1, …]
    Σ_h after[h,g] · A_h V_g          =  (Σ_h A_h Ṽ_h)_g   Ṽ_h = [after[h,0]·V_0, …]

The algebra is exact; only the order of the sums changes. An attention that mixes only after softmax has the identity as
``before``. The matrix products Q̃ K̃ᵀ and A Ṽ take H times the work of the original products, and the rewrite helps only
if fused GPU kernels support the head dim H·d (`LARGEST_FUSED`). All heads must share the mask M: a
mask M_k of each head would be inside the sum over k. Masks of matrix rank R could be merged into Q and K, but the head
dim would be R·H·d, too large for fused kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.scores.attention import AttentionScores
from gmmvit_deploy.models.scores.step import Step

LARGEST_FUSED = 256
"""The largest head dim with a fused kernel, measured in tensorrt-rtx 1.7.1: head dim 256 fuses, 264 does not."""


class WideHeads(nn.Module):
    """Base class of an attention with wide heads.

    scores: softmax and the steps before softmax that all heads share, without head mixing.
    queries, keys, values: the factors (H, 1, H·d) by which each head multiplies the projections; those of ``keys`` are
    1, because fused kernels require a separate K for each head.
    """

    operator_roles: ClassVar[Mapping[str, Role]] = {
        "softmax": "softmax",
        "matmul": "product",
        "mul": "mixing",
        "sum": "mixing",
    }
    queries: Tensor
    keys: Tensor
    values: Tensor

    def __init__(
        self,
        scores: AttentionScores,
        *,
        before: Float[Tensor, "heads heads"],
        after: Float[Tensor, "heads heads"],
        head_dim: int,
    ) -> None:
        super().__init__()
        self.scores = scores
        spread = [
            mixing.detach().repeat_interleave(head_dim, dim=1).unsqueeze(1)
            for mixing in (before.transpose(0, 1), after)
        ]
        self.register_buffer("queries", spread[0].clone())
        self.register_buffer("keys", torch.ones_like(spread[0]))
        self.register_buffer("values", spread[1].clone())

    def attended(
        self, query: Float[Tensor, "batch i inner"], key: Float[Tensor, "batch j inner"], value: Tensor
    ) -> Float[Tensor, "batch i inner"]:
        """Return the output before the output projection, for projections that are not split into heads."""
        query, key, value = (part.unsqueeze(1) for part in (query, key, value))
        weights = self.scores.weights(query * self.queries, key * self.keys)
        return (weights @ (value * self.values)).sum(dim=1)


def same_for_all_heads(step: Step) -> bool:
    """Return True if a step that multiplies has the same matrix for all heads."""
    constant = step.matrix()
    return constant.dim() < 3 or bool((constant == constant[:1]).all())
