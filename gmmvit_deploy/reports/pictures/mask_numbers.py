"""Measure masks, for example the locality, the negative entries, and the kernels (Gaussians) without effect."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.models.scores.attention import attention_scores
from gmmvit_deploy.models.scores.masks import squared_distances

if TYPE_CHECKING:
    from torch import nn

    from gmmvit_deploy.models.scores.step import StepNumbers

_DEAD_SHARE = 1e-6
NEAR = (1, 2, 3)
"""Distances in tokens.  For each distance, `HeadNumbers.within` has the share of the mask's mass up to the distance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNumbers:
    """Measurements of the mask M of a head.

    within: the shares of the mass Σ|M| at distances of at most 1, 2 and 3 tokens.
    itself: the mean of the diagonal M[i, i] divided by the mean of all entries.
    negative: the share of negative entries.
    dead: the kernels without effect: |alpha| is below a millionth of the largest of the head.
    alpha, sigma: of each kernel; empty if the mask is no Gaussian mixture.
    """

    within: tuple[float, ...]
    itself: float
    negative: float
    smallest: float
    largest: float
    dead: tuple[int, ...]
    alpha: tuple[float, ...]
    sigma: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerMasks:
    """The masks of an attention layer.

    matrices: (H, N, N) with N tokens in the grid of patches; H is 1 if all heads share a mask.
    underflowed: the number of zeros in the stored base mask, or None without one.
    dead: True if the masks have no influence on the logits, so that the export leaves them out.
    """

    layer: str
    grid: tuple[int, int]
    matrices: NDArray[np.float32]
    heads: tuple[HeadNumbers, ...]
    underflowed: int | None
    dead: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "grid": list(self.grid),
            "underflowed": self.underflowed,
            "dead": self.dead,
            "heads": [asdict(head) for head in self.heads],
        }


def masks_of(model: nn.Module) -> list[LayerMasks]:
    """Return the masks of a trained model, in the order in which the network applies the masks."""
    drawn = []
    for name, scores in attention_scores(model):
        for _, step in scores.steps():
            numbers = step.numbers()
            if numbers.patches is not None:
                drawn.append(_layer(name, numbers.patches.numpy(), numbers))
    return drawn


def _layer(name: str, matrix: NDArray[np.float32], numbers: StepNumbers) -> LayerMasks:
    matrices = matrix.reshape(-1, *matrix.shape[-2:])
    side = math.isqrt(matrices.shape[-1])
    grid = (side, side) if numbers.grid is None else numbers.grid
    distances = np.sqrt(squared_distances(grid).numpy())
    alpha = sigma = np.zeros((0, len(matrices)), np.float32)
    if numbers.alpha is not None and numbers.sigma is not None:
        alpha, sigma = numbers.alpha.numpy(), numbers.sigma.numpy()
    return LayerMasks(
        layer=name,
        grid=grid,
        matrices=matrices,
        heads=tuple(_numbers(m, distances, alpha[:, h], sigma[:, h]) for h, m in enumerate(matrices)),
        underflowed=numbers.underflowed,
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
