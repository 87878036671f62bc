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
from jaxtyping import Float, Int
from torch import Tensor, nn

from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.layers.blocks import flat_patches, layer_norm, linear_filters
from gmmvit_deploy.models.layers.roles import with_role

VIEWS = 5
"""The image and its four shifted copies."""


class ShiftedViews(nn.Module):
    """Concatenate an image and four copies, shifted by ``shift`` pixels down-right, down-left, up-right, up-left."""

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

    view_count: ClassVar[int] = VIEWS

    def __init__(self, side: int, dim: int, *, channels: int, role: Role = "embedding") -> None:
        super().__init__()
        self.side = side
        self.views = ShiftedViews(side // 2)
        self.norm = layer_norm(VIEWS * channels * side**2)
        self.project = with_role(nn.Linear(VIEWS * channels * side**2, dim), role)

    def forward(self, x: Float[Tensor, "batch channels h w"]) -> Float[Tensor, "batch n dim"]:
        return self.embedded(flat_patches(self.views(x), self.side))

    def embedded(self, patches: Float[Tensor, "batch n values"]) -> Float[Tensor, "batch n dim"]:
        """Embed flattened patches, in the order (row, column, view, channel)."""
        tokens: Tensor = self.project(self.norm(patches))
        return tokens

    def filters(self) -> Float[Tensor, "dim channels m m"]:
        """Return the filter of each feature of a token; the channels of a view follow those of the view before it."""
        return linear_filters(self.project.weight, self.side)


class ShiftedMerging(nn.Module):
    """Shifted patch tokenisation of a grid of tokens: patches of 2×2 tokens of width D become tokens of width 2D.

    A patch is a list of whole tokens, so a gather with constant indices makes all patches. It moves less memory than
    shifted copies with the features as channels.
    picked: as `picked_tokens` returns.
    forward: (B, g², D), tokens row by row → (B, g²/4, 2D).
    """

    operator_roles: ClassVar[Mapping[str, Role]] = {"pad": "shape", "constant_pad_nd": "shape"}
    picked: Int[Tensor, " places"]

    def __init__(self, grid: int, dim: int) -> None:
        super().__init__()
        self.grid = grid
        self.patches = ShiftedPatches(2, 2 * dim, channels=dim, role="projection")
        self.register_buffer("picked", picked_tokens(grid), persistent=False)

    def forward(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch quarter twice"]:
        with_zeros = nn.functional.pad(x, (0, 0, 0, 1))
        values = 4 * VIEWS * x.shape[-1]
        return self.patches.embedded(with_zeros.index_select(1, self.picked).reshape(-1, self.grid**2 // 4, values))


def picked_tokens(grid: int) -> Int[Tensor, " places"]:
    """Return the indices of the tokens in the patches of 2×2 tokens of a grid and its four shifted copies.

    The order is (patch, row, column, view). The index grid², of a row of zeros behind the tokens, stands for a place
    outside of the grid.
    """
    inside = torch.arange(1, grid**2 + 1, dtype=torch.float32).reshape(1, 1, grid, grid)  # 0: outside of the grid
    patches = flat_patches(ShiftedViews(1)(inside), 2).flatten().long()
    return torch.where(patches == 0, grid**2, patches - 1)
