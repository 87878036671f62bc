"""External attention: the tokens attend to a trained memory of S slots in place of each other.

    A[n, s] = exp(L[n, s]) / Σ_m exp(L[m, s])         softmax over the n tokens, for each slot
    W[n, s] = A[n, s] / (1e-9 + Σ_t A[n, t])          division by the sum over the slots (L1 norm)

    blocks            L = M₀ y + l₀,  out = proj(concat of the heads of M₁ W + m₁),  y = the heads of trans_dims(x)
    token transformer L = M₀ y,       out = y + proj(M₁ W + m₁),                     y = q_linear(norm(t))

All heads of a block share the memories M₀ (S, d) and M₁ (d, S), where d is the head dim. A token influences the other
tokens only through the sums over the tokens. Because every sum over the tokens includes all tokens of an image, padding
with additional tokens would change the logits.
Source: the paper "Beyond Self-attention: External Attention using Two Linear Layers for Visual Tasks", and its code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.models.layers.blocks import Mlp, PreNormBlock, layer_norm
from gmmvit_deploy.models.layers.roles import with_role
from gmmvit_deploy.precision import Role

__all__ = [
    "SLOT_SUM_EPS",
    "ExternalAttention",
    "ExternalBlock",
    "MergedExternalAttention",
    "SlotWeights",
    "TokenTransformer",
]

SLOT_SUM_EPS = 1e-9
"""The number that the released code adds to the sum over the slots.  In float16 this number is 0."""


class SlotWeights(nn.Module):
    """Softmax over the tokens, then division by the sum over the slots of each head.

    slots: S, the number of slots of a memory.
    Both operations have roles that compute in float32 in every precision: in float16, 1e-9 becomes 0, and a token
    whose S weights all underflow would be 0/0.
    """

    operator_roles: ClassVar[Mapping[str, Role]] = {"softmax": "softmax", "sum": "norm", "add": "norm", "div": "norm"}

    eps: Tensor

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.slots = slots
        # The exporter drops the addition of a scalar below 1e-8, and a token whose weights all underflow would be 0/0
        # in the graph. The exporter keeps the addition of a vector.
        self.register_buffer("eps", torch.full((1,), SLOT_SUM_EPS), persistent=False)

    def forward(
        self, logits: Float[Tensor, "batch n heads_slots"], *, first: bool = False
    ) -> Float[Tensor, "batch given heads_slots"]:
        """Return the weights W of all tokens, or only of the first token."""
        weights = torch.softmax(logits, dim=1)
        if first:
            weights = weights[:, :1]
        by_head = weights.unflatten(-1, (-1, self.slots))
        divided: Tensor = by_head / (self.eps + by_head.sum(dim=-1, keepdim=True))
        return divided.flatten(-2)


class ExternalAttention(nn.Module):
    """Multi-head external attention as trained.

    project: trans_dims, the linear map to ``heads`` heads of ``head_dim`` features.
    to_slots, from_slots: the memories M₀ with l₀, and M₁ with m₁, shared by all heads.
    """

    memories: ClassVar[tuple[str, ...]] = ("to_slots", "from_slots")

    def __init__(self, *, dim: int, heads: int, head_dim: int, slots: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = with_role(nn.Linear(dim, heads * head_dim), "projection")
        self.to_slots = with_role(nn.Linear(head_dim, slots), "projection")
        self.weights = SlotWeights(slots)
        self.from_slots = with_role(nn.Linear(slots, head_dim), "projection")
        self.out = with_role(nn.Linear(heads * head_dim, dim), "projection")

    def forward(self, x: Float[Tensor, "batch n dim"], *, first: bool = False) -> Float[Tensor, "batch given dim"]:
        logits: Tensor = self.to_slots(self.project(x).unflatten(-1, (self.heads, -1)))
        weights: Tensor = self.weights(logits.flatten(-2), first=first)
        out: Tensor = self.out(self.from_slots(weights.unflatten(-1, (self.heads, -1))).flatten(-2))
        return out


class MergedExternalAttention(nn.Module):
    """`ExternalAttention` whose memories are merged with their neighbours: a linear map, the two normalisations, and a
    linear map.

    to_slots: (heads · S, dim), without bias.  out: (dim, heads · S).
    """

    def __init__(self, *, dim: int, heads: int, slots: int) -> None:
        super().__init__()
        self.to_slots = with_role(nn.Linear(dim, heads * slots, bias=False), "projection")
        self.weights = SlotWeights(slots)
        self.out = with_role(nn.Linear(heads * slots, dim), "projection")

    def forward(self, x: Float[Tensor, "batch n dim"], *, first: bool = False) -> Float[Tensor, "batch given dim"]:
        out: Tensor = self.out(self.weights(self.to_slots(x), first=first))
        return out


class ExternalBlock(PreNormBlock):
    """Pre-norm transformer block with external attention.

    If the block gives only the first token, the softmax still runs over all tokens, and everything after the softmax
    runs on the first token.
    """

    attention: ExternalAttention | MergedExternalAttention

    def forward(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch given dim"]:
        if self.gives != "first":
            return super().forward(x)
        return self.with_mlp(x[:, :1] + self.attention(self.attention_norm(x), first=True))


class TokenTransformer(nn.Module):
    """Single-head external attention from input width ``width`` to output width ``dim``, then an mlp of hidden width
    ``dim``.  The skip connection starts at y, the output of the first linear map.
    """

    memories: ClassVar[tuple[str, ...]] = ("to_slots", "from_slots")
    operator_roles: ClassVar[Mapping[str, Role]] = {"add": "residual"}

    from_slots: nn.Module

    def __init__(self, *, width: int, dim: int, slots: int) -> None:
        super().__init__()
        self.attention_norm = layer_norm(width)
        self.project = with_role(nn.Linear(width, dim), "projection")
        self.to_slots = with_role(nn.Linear(dim, slots, bias=False), "projection")
        self.weights = SlotWeights(slots)
        self.from_slots = with_role(nn.Linear(slots, dim), "projection")
        self.out = with_role(nn.Linear(dim, dim), "projection")
        self.mlp_norm = layer_norm(dim)
        self.mlp = Mlp(dim, dim)

    def forward(self, x: Float[Tensor, "batch n width"]) -> Float[Tensor, "batch n dim"]:
        y = self.project(self.attention_norm(x))
        x = y + self.out(self.from_slots(self.weights(self.to_slots(y))))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out
