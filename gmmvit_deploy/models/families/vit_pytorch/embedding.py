"""The patch embeddings and the sinusoidal positions of vit-pytorch.

linear    x = W · patch + b
normed    x = norm(W · norm(patch) + b)
shifted   x = W · norm(patch of five images) + b

The five images of the shifted embedding are the image and four copies that are shifted by a pixel: to the right, to the
left, down and up. Pixels outside the image are 0. The copies are further channels, so a patch has 5·c·p·p values.

Position of the patch in row r and column s of the grid, for k = 0 … D/4 − 1:
    [sin(s·ω_k), cos(s·ω_k), sin(r·ω_k), cos(r·ω_k)]        ω_k = 10000^(−k / (D/4 − 1))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.models.families.vit_pytorch.spec import VitPytorchSpec
from gmmvit_deploy.models.layers.blocks import PatchEmbedding, flat_patches, layer_norm
from gmmvit_deploy.models.layers.normed_patches import NormedPatchEmbedding
from gmmvit_deploy.models.scores.grids import lattice_points
from gmmvit_deploy.precision import Role

__all__ = ["ShiftedPatchEmbedding", "embedding_from_spec", "sinusoidal_positions"]

_LONGEST_WAVE = 10000.0
_SHIFTS = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0))
"""(rows, columns) by which the contents of each of the five images are moved down and to the right."""
VIEWS = len(_SHIFTS)


class ShiftedPatchEmbedding(PatchEmbedding):
    """Shifted patch tokenization (SPT) with shifts of a single pixel."""

    view_count: ClassVar[int] = VIEWS
    operator_roles: ClassVar[Mapping[str, Role]] = {"pad": "shape"}

    def __init__(self, patch_size: int, dim: int, *, channels: int) -> None:
        super().__init__(patch_size, dim, channels=VIEWS * channels)
        self.patch_norm = layer_norm(VIEWS * channels * patch_size**2)

    def forward(self, images: Float[Tensor, "batch channels side side"]) -> Float[Tensor, "batch n dim"]:
        rows, columns = images.shape[-2:]
        padded = nn.functional.pad(images, (1, 1, 1, 1))
        views = [padded[..., 1 - down : 1 - down + rows, 1 - right : 1 - right + columns] for down, right in _SHIFTS]
        patches = flat_patches(torch.cat(views, dim=1), self.patch_size)
        tokens: Tensor = self.project(self.patch_norm(patches))
        return tokens


def embedding_from_spec(spec: VitPytorchSpec) -> PatchEmbedding:
    """Return the patch embedding of a network, with random weights."""
    kinds = {"linear": PatchEmbedding, "normed": NormedPatchEmbedding, "shifted": ShiftedPatchEmbedding}
    return kinds[spec.embedding](spec.patch_size, spec.dim, channels=spec.channels)


def sinusoidal_positions(grid: int, dim: int) -> Float[Tensor, "1 n dim"]:
    """Return the positions of a square grid, computed in float32 as in vit-pytorch, also for a model in float64.

    dim: the width D, a multiple of 4 and at least 8.
    """
    waves = 1.0 / _LONGEST_WAVE ** (torch.arange(dim // 4) / (dim // 4 - 1))
    rows, columns = (points[:, None] * waves for points in lattice_points(grid).unbind(1))
    return torch.cat([columns.sin(), columns.cos(), rows.sin(), rows.cos()], dim=1)[None]
