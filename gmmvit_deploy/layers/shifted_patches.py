"""Shifted patch tokenisation (SPT): patches of an image beside four copies of the image, each shifted along a diagonal.

    s = m // 2;  x̃ = x with s rows and columns of zeros around x
    u = [x, x(i−s, j−s), x(i−s, j+s), x(i+s, j−s), x(i+s, j+s)]        5c channels, zero outside of x
    tokens = W · norm(patches of u) + b                                m × m patches, (row, column, channel)

m is the side of a patch and c the number of channels. The zeros stand around the normalised image, so a graph that
normalises pixels pads after the normalisation.
Source: "Vision Transformer for Small-Size Datasets" (arXiv 2112.13492) and the released code of the paper's authors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.layers.blocks import flat_patches, layer_norm
from gmmvit_deploy.layers.roles import with_role
from gmmvit_deploy.precision import Role

__all__ = ["VIEWS", "ShiftedMerging", "ShiftedPatches", "ShiftedViews"]

VIEWS = 5
"""The image and its four shifted copies."""


class ShiftedViews(nn.Module):
    """Concatenate an image and its four copies, shifted by ``shift`` pixels down-right, down-left, up-right, up-left.

    The channels of a copy follow the channels of the copy before it. The operators only move values.
    """

    operator_roles: ClassVar[Mapping[str, Role]] = {"pad": "shape", "constant_pad_nd": "shape"}

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, x: Float[Tensor, "batch channels h w"]) -> Float[Tensor, "batch views h w"]:
        height, width = x.shape[-2:]
        s = self.shift
        padded = nn.functional.pad(x, (s, s, s, s))
        corners = [(0, 0), (0, 2 * s), (2 * s, 0), (2 * s, 2 * s)]
        return torch.cat([x, *(padded[:, :, i : i + height, j : j + width] for i, j in corners)], dim=1)


class ShiftedPatches(nn.Module):
    """Apply LayerNorm and a linear layer to each m × m patch of the image and its four shifted copies.

    side: m, the side of a patch; the copies are shifted by m // 2.  dim: D, the width of the tokens.
    role: the role of the linear layer: ``embedding`` for patches of an image.
    forward: (B, c, h, w) → (B, h·w / m², D), tokens row by row.
    """

    def __init__(self, side: int, dim: int, *, channels: int, role: Role = "embedding") -> None:
        super().__init__()
        self.side = side
        self.views = ShiftedViews(side // 2)
        self.norm = layer_norm(VIEWS * channels * side**2)
        self.project = with_role(nn.Linear(VIEWS * channels * side**2, dim), role)

    def forward(self, x: Float[Tensor, "batch channels h w"]) -> Float[Tensor, "batch n dim"]:
        tokens: Tensor = self.project(self.norm(flat_patches(self.views(x), self.side)))
        return tokens


class ShiftedMerging(nn.Module):
    """Shifted patch tokenisation of a grid of tokens: patches of 2×2 tokens of width D become tokens of width 2D.

    forward: (B, g², D), tokens row by row → (B, g²/4, 2D).
    """

    def __init__(self, grid: int, dim: int) -> None:
        super().__init__()
        self.grid = grid
        self.patches = ShiftedPatches(2, 2 * dim, channels=dim, role="projection")

    def forward(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch quarter twice"]:
        lattice = x.transpose(1, 2).reshape(-1, x.shape[-1], self.grid, self.grid)
        merged: Tensor = self.patches(lattice)
        return merged
