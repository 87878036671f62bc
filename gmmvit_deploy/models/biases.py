"""Biases on attention scores: forward(S) = S + B, with B independent of the input.

As with masks, ``matrix()`` is the one place where B is computed; folding stores it.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

__all__ = ["Bias", "ConstantBias", "WindowBias", "relative_position_index", "shift_mask"]

_OUTSIDE = -100.0  # what the released code adds to scores between tokens that only the roll made neighbours


def relative_position_index(window: int) -> Int[Tensor, "n n"]:
    """For tokens i and j of a window, the row of the bias table for the offset between them."""
    lattice = torch.arange(window)
    rows, columns = torch.meshgrid(lattice, lattice, indexing="ij")
    points = torch.stack([rows.flatten(), columns.flatten()])
    offsets = points[:, :, None] - points[:, None, :] + window - 1
    return offsets[0] * (2 * window - 1) + offsets[1]


def shift_mask(grid: int, window: int, shift: int) -> Float[Tensor, "windows n n"]:
    """0 where two tokens of a rolled window were neighbours before the roll, −100 where not."""
    edges = torch.arange(grid)
    # Three bands along each side: untouched windows, the rest of the last window, what was rolled over.
    band = (edges >= grid - window).long() + (edges >= grid - shift).long()
    region = band[:, None] * 3 + band[None, :]
    side = grid // window
    windows = region.reshape(side, window, side, window).transpose(1, 2).reshape(side**2, window**2)
    apart = windows[:, None, :] != windows[:, :, None]
    return torch.where(apart, _OUTSIDE, 0.0)


class Bias(nn.Module):
    """A constant summand on attention scores.  Abstract."""

    def matrix(self) -> Tensor:
        """B, broadcastable over the scores."""
        raise NotImplementedError

    def forward(self, scores: Tensor) -> Tensor:
        return scores + self.matrix()


class WindowBias(Bias):
    """B[w,h,i,j] = table[index[i,j], h] + outside[w,i,j]: Swin's relative position bias and shift mask.

    Shapes: table ((2·window−1)², H); index (n, n) int64; outside (windows, n, n) or None where
    nothing is shifted, and then B is (H, n, n).
    """

    index: Tensor
    outside: Tensor | None

    def __init__(self, table: Tensor, index: Int[Tensor, "n n"], outside: Float[Tensor, "windows n n"] | None) -> None:
        super().__init__()
        self.table = nn.Parameter(table)
        self.register_buffer("index", index)
        self.register_buffer("outside", outside)

    def matrix(self) -> Tensor:
        bias = self.table[self.index.flatten()].reshape(*self.index.shape, -1).permute(2, 0, 1)
        return bias if self.outside is None else bias + self.outside[:, None]


class ConstantBias(Bias):
    """B = constant: what folding leaves behind."""

    constant: Tensor

    def __init__(self, constant: Tensor) -> None:
        super().__init__()
        self.register_buffer("constant", constant)

    def matrix(self) -> Tensor:
        return self.constant
