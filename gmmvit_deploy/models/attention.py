"""Masked multi-head self-attention, as trained.

P = softmax(M ∘ (Q Kᵀ · d^(−1/2))) V        M = 1 in a plain model
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.models.masks import Mask

__all__ = ["MaskedAttention"]


class MaskedAttention(nn.Module):
    """Attention whose scores are multiplied by a mask before softmax.

    Q, K and V come stacked in that order from one projection without bias, each (H, d). There is
    no output projection when one head spans the whole model, as in the released code.

    ``scale`` is None once folding has merged it into the mask.
    """

    scale: float | None

    def __init__(self, *, dim: int, heads: int, head_dim: int, mask: Mask | None, projects_output: bool) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * heads * head_dim, bias=False)
        self.mask = mask
        self.out = nn.Linear(heads * head_dim, dim) if projects_output else nn.Identity()

    def _heads_of(self, x: Float[Tensor, "batch n inner"]) -> Float[Tensor, "batch heads n d"]:
        return x.reshape(*x.shape[:-1], self.heads, self.head_dim).transpose(1, 2)

    def forward(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch n dim"]:
        query, key, value = (self._heads_of(part) for part in self.qkv(x).chunk(3, dim=-1))
        scores = query @ key.transpose(-2, -1)
        if self.scale is not None:
            scores = scores * self.scale
        if self.mask is not None:
            scores = self.mask(scores)
        mixed = torch.softmax(scores, dim=-1) @ value
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return projected
