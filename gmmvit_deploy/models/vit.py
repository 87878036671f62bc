"""The vision transformer that the mask goes into.

x = patches(image)·W + b  [class token first]  + position
x = x + attention(norm(x));  x = x + mlp(norm(x))          depth times, pre-norm
logits = head(norm(mean of the tokens))                    masked: no class token
logits = head(norm(class token))                           plain, as released
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.models.attention import MaskedAttention
from gmmvit_deploy.models.masks import mask_from_spec
from gmmvit_deploy.specs import ViTSpec

__all__ = ["ViT"]

LAYER_NORM_EPS = 1e-5


class PatchEmbedding(nn.Module):
    """One linear map of each p×p patch, flattened with the channel fastest: (row, column, channel)."""

    def __init__(self, patch_size: int, dim: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.project = nn.Linear(3 * patch_size**2, dim)

    def forward(self, images: Float[Tensor, "batch 3 side side"]) -> Float[Tensor, "batch n dim"]:
        patches: Tensor = images.unflatten(3, (-1, self.patch_size)).unflatten(2, (-1, self.patch_size))
        # (B, channel, grid row, row, grid column, column)
        patches = patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        projected: Tensor = self.project(patches)
        return projected


class Mlp(nn.Sequential):
    """Linear, exact (erf) GELU, linear."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__(nn.Linear(dim, hidden_dim), nn.GELU(), nn.Linear(hidden_dim, dim))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, spec: ViTSpec) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(spec.dim, eps=LAYER_NORM_EPS)
        self.attention = MaskedAttention(
            dim=spec.dim,
            heads=spec.heads,
            head_dim=spec.head_dim,
            mask=mask_from_spec(spec.mask, heads=spec.heads, grid=spec.grid),
            projects_output=spec.projects_output,
        )
        self.mlp_norm = nn.LayerNorm(spec.dim, eps=LAYER_NORM_EPS)
        self.mlp = Mlp(spec.dim, spec.mlp_dim)

    def forward(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch n dim"]:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class ViT(nn.Module):
    """Vision transformer, plain or masked.

    forward: images (B, 3, S, S), normalised, float32 → logits (B, C).
    """

    def __init__(self, spec: ViTSpec) -> None:
        super().__init__()
        self.spec = spec
        self.patch_embedding = PatchEmbedding(spec.patch_size, spec.dim)
        self.class_token = nn.Parameter(torch.randn(1, 1, spec.dim)) if spec.class_token else None
        self.position_embedding = nn.Parameter(0.02 * torch.randn(1, spec.tokens, spec.dim))
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.depth))
        self.head_norm = nn.LayerNorm(spec.dim, eps=LAYER_NORM_EPS)
        self.head = nn.Linear(spec.dim, spec.classes)

    def forward(self, images: Float[Tensor, "batch 3 side side"]) -> Float[Tensor, "batch classes"]:
        x = self.patch_embedding(images)
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = x + self.position_embedding
        for block in self.blocks:
            x = block(x)
        pooled = x[:, 0] if self.class_token is not None else x.mean(dim=1)
        logits: Tensor = self.head(self.head_norm(pooled))
        return logits
