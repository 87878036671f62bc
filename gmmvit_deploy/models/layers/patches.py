"""Patches of an image or of a grid of tokens: side by side, shifted (SPT), or overlapping (unfolded).

    linear      W · patch + b                   patch: c·p·p values, in the order (row, column, channel)
    normed      norm(W · norm(patch) + b)       vit-pytorch's later releases

Shifted patch tokenisation (SPT) cuts an image x and four copies, each shifted along a diagonal:

    s = m // 2;  x̃ = x with s rows and columns of zeros around x
    u = [x, x(i−s, j−s), x(i−s, j+s), x(i+s, j−s), x(i+s, j+s)]        5c channels, zero outside of x
    tokens = W · norm(patches of u) + b                                m × m patches, (row, column, channel)

The zeros stand around the normalised image, so a graph that normalises pixels pads after the normalisation.
Source: "Vision Transformer for Small-Size Datasets" (arXiv 2112.13492) and the released code of the paper's authors.

Unfolding collects k×k neighbourhoods, in the order (channel, row, column):

    out[b, (i, j), (c, r, s)] = x[b, c, stride·i + r − padding, stride·j + s − padding]        zero outside of x
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.layers.blocks import layer_norm
from gmmvit_deploy.models.layers.roles import with_role


def flat_patches(images: Float[Tensor, "batch channels h w"], side: int) -> Float[Tensor, "batch n values"]:
    """Cut images into patches of ``side`` × ``side`` pixels, each flattened in the order (row, column, channel)."""
    patches: Tensor = images.unflatten(3, (-1, side)).unflatten(2, (-1, side))
    # (B, channel, row of the patch, row in the patch, column of the patch, column in the patch)
    return patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


class PatchEmbedding(nn.Module):
    """Apply a linear layer to each p×p patch, flattened in the order (row, column, channel).

    view_count: the number of images whose patches the layer reads together: 1, or more with shifted copies.
    """

    view_count: ClassVar[int] = 1

    def __init__(self, patch_size: int, dim: int, *, channels: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.project = with_role(nn.Linear(channels * patch_size**2, dim), "embedding")

    def forward(self, images: Float[Tensor, "batch channels side side"]) -> Float[Tensor, "batch n dim"]:
        projected: Tensor = self.project(flat_patches(images, self.patch_size))
        return projected

    def filters(self) -> Float[Tensor, "dim channels p p"]:
        """Return the filter of each feature of a token; the channels of a view follow those of the view before it."""
        filters: Tensor = self.project.weight.detach().unflatten(1, (self.patch_size, self.patch_size, -1))
        return filters.permute(0, 3, 1, 2)


class NormedPatchEmbedding(PatchEmbedding):
    """A `PatchEmbedding` with norms around the linear layer."""

    def __init__(self, patch_size: int, dim: int, *, channels: int) -> None:
        super().__init__(patch_size, dim, channels=channels)
        self.patch_norm: nn.LayerNorm = layer_norm(channels * patch_size**2)
        self.token_norm: nn.LayerNorm = layer_norm(dim)

    def forward(self, images: Float[Tensor, "batch channels side side"]) -> Float[Tensor, "batch n dim"]:
        tokens: Tensor = self.token_norm(self.project(self.patch_norm(flat_patches(images, self.patch_size))))
        return tokens


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


class ShiftedPatches(PatchEmbedding):
    """Apply LayerNorm and a linear layer to each m × m patch of the image and its four shifted copies.

    side: m; the copies are shifted by m // 2.  dim: D, the width of the tokens.
    """

    view_count: ClassVar[int] = VIEWS

    def __init__(self, side: int, dim: int, *, channels: int, role: Role = "embedding") -> None:
        super().__init__(side, dim, channels=VIEWS * channels)
        with_role(self.project, role)
        self.views = ShiftedViews(side // 2)
        self.norm = layer_norm(VIEWS * channels * side**2)

    def forward(self, x: Float[Tensor, "batch channels h w"]) -> Float[Tensor, "batch n dim"]:
        return self.embedded(flat_patches(self.views(x), self.patch_size))

    def embedded(self, patches: Float[Tensor, "batch n values"]) -> Float[Tensor, "batch n dim"]:
        """Embed flattened patches, in the order (row, column, view, channel)."""
        tokens: Tensor = self.project(self.norm(patches))
        return tokens


class ShiftedMerging(nn.Module):
    """Shifted patch tokenisation of a grid of tokens: (B, g², D), row by row → (B, g²/4, 2D).

    A patch is a list of whole tokens, so a gather with constant indices makes all patches. It moves less memory than
    shifted copies with the features as channels.
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

    The order is (patch, row, column, view). The index grid², of a row of zeros, stands for a place outside of the grid.
    """
    inside = torch.arange(1, grid**2 + 1, dtype=torch.float32).reshape(1, 1, grid, grid)  # 0: outside of the grid
    patches = flat_patches(ShiftedViews(1)(inside), 2).flatten().long()
    return torch.where(patches == 0, grid**2, patches - 1)


class Unfold(nn.Module):
    """(B, c, S, S) → (B, tokens, c·side²): the neighbourhoods of ``side`` × ``side`` entries, with zero padding."""

    operator_roles: ClassVar[Mapping[str, Role]] = {"im2col": "shape"}

    def __init__(self, side: int, *, stride: int, padding: int) -> None:
        super().__init__()
        self.side, self.stride, self.padding = side, stride, padding

    def forward(self, lattice: Float[Tensor, "batch channels s s"]) -> Float[Tensor, "batch n width"]:
        return nn.functional.unfold(lattice, self.side, stride=self.stride, padding=self.padding).transpose(1, 2)


def unfolded_filters(weight: Float[Tensor, "dim width"], side: int) -> Float[Tensor, "dim channels side side"]:
    """Return the weight of a linear layer on the output of `Unfold` as a filter for each output feature."""
    filters: Tensor = weight.detach().unflatten(1, (-1, side, side))
    return filters


class UnfoldConvolution(nn.Module):
    """An `Unfold` as a depthwise convolution with side² one-hot filters for each channel, which is exact.

    Every runtime supports convolutions; an exported unfold operation would be index arithmetic and Gather operators.
    """

    def __init__(self, unfold: Unfold, channels: int) -> None:
        super().__init__()
        positions = unfold.side**2
        convolution = nn.Conv2d(
            channels,
            positions * channels,
            unfold.side,
            stride=unfold.stride,
            padding=unfold.padding,
            groups=channels,
            bias=False,
        )
        self.pick = with_role(convolution.requires_grad_(False), "depthwise")
        kernels = torch.eye(positions).reshape(positions, 1, unfold.side, unfold.side)
        with torch.no_grad():
            self.pick.weight.copy_(kernels.repeat(channels, 1, 1, 1))

    def forward(self, lattice: Float[Tensor, "batch channels s s"]) -> Float[Tensor, "batch n width"]:
        picked: Tensor = self.pick(lattice)
        return picked.flatten(2).transpose(1, 2)


@torch.no_grad()
def unfold_as_convolution(model: Any) -> tuple[str, ...]:
    """Replace each `Unfold` of ``model.unfolds``, which reads ``model.unfolded_channels``, by a convolution.

    Errors: FoldError when a convolution and its `Unfold` differ on random inputs in any bit.
    """
    changed = []
    for step, channels in enumerate(getattr(model, "unfolded_channels", ())):
        unfold = model.unfolds[step]
        if not isinstance(unfold, Unfold):
            continue
        replacement = UnfoldConvolution(unfold, channels)
        lattice = torch.randn(2, channels, 16, 16, generator=torch.Generator().manual_seed(step))
        if not replacement(lattice).equal(unfold(lattice)):
            raise FoldError(f"unfolds.{step}: the convolution that replaces this Unfold module changes the output")
        model.unfolds[step] = replacement
        changed.append(f"unfolds.{step}")
    return tuple(changed)


def image_patches(spec: Any) -> nn.Module:
    """Return `ShiftedPatches` for a spec with SPT, else a convolution to ``spec.dim`` features."""
    if spec.spt:
        return ShiftedPatches(spec.patch_size, spec.dim, channels=spec.channels)
    convolution = nn.Conv2d(spec.channels, spec.dim, spec.patch_size, stride=spec.patch_size)
    return with_role(convolution, "embedding")
