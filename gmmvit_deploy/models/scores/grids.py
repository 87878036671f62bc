"""Grids of tokens: positions of the tokens that a mask or a bias is computed from."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

Grid = int | tuple[int, int]
"""A grid of tokens: (rows, columns), or an integer g for a g × g grid."""


def rows_and_columns(grid: Grid) -> tuple[int, int]:
    """Return (rows, columns) of a grid."""
    return (grid, grid) if isinstance(grid, int) else grid


def lattice_points(grid: Grid) -> Float[Tensor, "n 2"]:
    """Return (row, column) of each token of a grid, in float32.  The tokens are numbered row by row."""
    sides = [torch.arange(side, dtype=torch.float32) for side in rows_and_columns(grid)]
    rows, columns = torch.meshgrid(*sides, indexing="ij")
    return torch.stack([rows.flatten(), columns.flatten()], dim=1)
