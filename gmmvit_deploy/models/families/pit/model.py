"""PiT: a ViT with a class token, in several stages with pooling between the stages.

x = [class token, convolution(image)] + position
stage:    ViT blocks; the mask multiplies only the scores between patches, not the row and column of the class token
pooling:  patches:      3×3 depthwise convolution of stride 2 that doubles the channels, then a 1×1 convolution
          class token:  linear layer that doubles the channels
logits = head(norm(class token))

SPT replaces the patch convolution, and the convolutions of the pooling (`layers.patches`). LSA replaces the
steps on the scores (`scores.locality`), also in the row and column of the class token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.families.pit import PiTSpec
from gmmvit_deploy.models.layers.blocks import Block, layer_norm
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.layers.patches import ShiftedMerging, image_patches
from gmmvit_deploy.models.layers.roles import with_role
from gmmvit_deploy.models.scores.attention import scaled_scores
from gmmvit_deploy.models.scores.locality import locality_scores
from gmmvit_deploy.models.scores.masks import PrefixMask, mask_from_spec


class Pooling(nn.Module):
    """Halve the grid of the patches and double the width of all tokens."""

    def __init__(self, grid: int, dim: int) -> None:
        super().__init__()
        self.grid = grid
        self.depthwise = with_role(nn.Conv2d(dim, 2 * dim, 3, stride=2, padding=1, groups=dim), "depthwise")
        self.pointwise = with_role(nn.Conv2d(2 * dim, 2 * dim, 1), "projection")
        self.class_token = with_role(nn.Linear(dim, 2 * dim), "projection")

    def forward(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch m twice"]:
        token, patches = x[:, :1], x[:, 1:]
        lattice = patches.transpose(1, 2).reshape(-1, x.shape[-1], self.grid, self.grid)
        pooled = self.pointwise(self.depthwise(lattice)).flatten(2).transpose(1, 2)
        return torch.cat([self.class_token(token), pooled], dim=1)


class ShiftedPooling(nn.Module):
    """Merge 2×2 patches with shifted patch tokenisation, and double the class token's width with a linear layer."""

    def __init__(self, grid: int, dim: int) -> None:
        super().__init__()
        self.merge = ShiftedMerging(grid, dim)
        self.class_token = with_role(nn.Linear(dim, 2 * dim), "projection")

    def forward(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch m twice"]:
        return torch.cat([self.class_token(x[:, :1]), self.merge(x[:, 1:])], dim=1)


class PiT(Model):
    """Pooling-based vision transformer (PiT), plain or masked."""

    operator_roles: ClassVar[Mapping[str, Role]] = {"add": "bias"}

    spec: PiTSpec

    def __init__(self, spec: PiTSpec) -> None:
        super().__init__()
        self.spec = spec
        self.patch_embedding = image_patches(spec)
        self.class_token = nn.Parameter(torch.randn(1, 1, spec.dim))
        self.position_embedding = nn.Parameter(0.02 * torch.randn(1, spec.grids[0] ** 2 + 1, spec.dim))
        self.stages = nn.ModuleList(
            nn.Sequential(*(_block(spec, stage) for _ in range(depth))) for stage, depth in enumerate(spec.depths)
        )
        pooling = ShiftedPooling if spec.spt else Pooling
        self.poolings = nn.ModuleList(
            pooling(grid, dim) for grid, dim in zip(spec.grids[:-1], spec.dims[:-1], strict=True)
        )
        self.head_norm = layer_norm(spec.dims[-1])
        self.head = with_role(nn.Linear(spec.dims[-1], spec.classes), "head")

    def logits_and_features(
        self, images: Float[Tensor, "batch channels side side"]
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch dim"]]:
        x = self.patch_embedding(images)
        if not self.spec.spt:
            x = x.flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1) + self.position_embedding
        for index, stage in enumerate(self.stages):
            x = stage(x)
            if index < len(self.poolings):
                x = self.poolings[index](x)
        features: Tensor = self.head_norm(x[:, 0])
        return self.head(features), features


def _block(spec: PiTSpec, stage: int) -> Block:
    heads, head_dim, grid = spec.heads[stage], spec.head_dim, spec.grids[stage]
    if spec.lsa:
        scores = locality_scores(heads=heads, head_dim=head_dim, tokens=grid**2 + 1)
    else:
        patches = mask_from_spec(spec.mask, heads=heads, grid=grid)
        scores = scaled_scores(head_dim**-0.5, mask=None if patches is None else PrefixMask(patches))
    return Block(dim=spec.dims[stage], heads=heads, head_dim=head_dim, mlp_dim=spec.mlp_dims[stage], scores=scores)
