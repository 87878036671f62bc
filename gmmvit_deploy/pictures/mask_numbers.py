"""Masks in numbers: how local, how extrovert, where negative, which kernels are dead, what underflowed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.folding.passes import masked_scores
from gmmvit_deploy.models.masks import (
    ClassTokenMask,
    ClosedFormGaussianMask,
    GaussianMixtureMask,
    Mask,
    squared_distances,
)

if TYPE_CHECKING:
    from torch import nn

__all__ = ["HeadNumbers", "LayerMasks", "masks_of"]

_DEAD_SHARE = 1e-6
NEAR = (1, 2, 3)
"""Distances, in tokens of the grid, within which a head's mass is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNumbers:
    """One head of one layer.

    within: share of the mask's absolute mass at distance ≤ 1, ≤ 2 and ≤ 3; the rest is far away.
    itself: mean of M[i,i], what a token gives of itself, over the mean of the row it stands in.
    negative: share of entries below zero.  dead: kernels that add less than a millionth.
    """

    within: tuple[float, ...]
    itself: float
    negative: float
    smallest: float
    largest: float
    dead: tuple[int, ...]
    alpha: tuple[float, ...]
    sigma: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerMasks:
    """The masks of one attention.  matrices: (H, N, N) over the patch grid, grid × grid tokens.

    underflowed: entries of the stored base that are zero; None where there is no stored base.
    """

    layer: str
    grid: int
    matrices: NDArray[np.float32]
    heads: tuple[HeadNumbers, ...]
    underflowed: int | None

    def to_json(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "grid": self.grid,
            "underflowed": self.underflowed,
            "heads": [head.to_json() for head in self.heads],
        }


def masks_of(model: nn.Module) -> list[LayerMasks]:
    """Every mask of a trained model, in the order in which the network applies them."""
    found = []
    for name, scores in masked_scores(model):
        if scores.mask is None:
            continue
        mask = scores.mask.patches if isinstance(scores.mask, ClassTokenMask) else scores.mask
        found.append(_layer(name, mask))
    return found


def _layer(name: str, mask: Mask) -> LayerMasks:
    matrix = mask.matrix().detach().numpy()
    matrices = matrix.reshape(-1, *matrix.shape[-2:])
    grid = math.isqrt(matrices.shape[-1])
    distances = np.sqrt(squared_distances(grid).numpy())
    alpha = sigma = np.zeros((0, len(matrices)), np.float32)
    if isinstance(mask, GaussianMixtureMask | ClosedFormGaussianMask):
        alpha, sigma = mask.alpha.detach().numpy()[..., 0, 0], mask.sigma.detach().numpy()[..., 0, 0]
    return LayerMasks(
        layer=name,
        grid=grid,
        matrices=matrices,
        heads=tuple(_numbers(m, distances, alpha[:, h], sigma[:, h]) for h, m in enumerate(matrices)),
        underflowed=int((mask.base == 0).sum()) if isinstance(mask, GaussianMixtureMask) else None,
    )


def _numbers(
    matrix: NDArray[np.float32], distances: NDArray[Any], alpha: NDArray[Any], sigma: NDArray[Any]
) -> HeadNumbers:
    mass = np.abs(matrix.astype(np.float64))
    total = float(mass.sum()) or 1.0
    mean = float(matrix.mean())
    strongest = float(np.abs(alpha).max()) if len(alpha) else 0.0
    return HeadNumbers(
        within=tuple(float(mass[distances <= near].sum() / total) for near in NEAR),
        itself=float(np.diagonal(matrix).mean() / mean) if mean else 0.0,
        negative=float((matrix < 0).mean()),
        smallest=float(matrix.min()),
        largest=float(matrix.max()),
        dead=tuple(int(k) for k in np.flatnonzero(np.abs(alpha) < _DEAD_SHARE * strongest)),
        alpha=tuple(map(float, alpha)),
        sigma=tuple(map(float, sigma)),
    )
