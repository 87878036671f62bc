"""Lay out masks and biases for `masked_attention.c`.  Imports no module of ours: it is copied into a server's model.

An entry of a Gaussian mixture mask depends only on the offset between two tokens: on how many rows and columns they
are apart. A mask over g × g tokens therefore has (2g − 1)² different numbers per head instead of g⁴, and the kernel
reads only these from memory (see `masked_attention.h`). The layout is chosen from the numbers of the mask: learned
masks do not depend on the offset alone and are stored whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

__all__ = ["LANES", "LOG2_E", "Arithmetic", "PreparedMask", "prepared_bias", "prepared_mask", "takes_bias"]

Arithmetic = Literal["f32", "bf16"]
LANES = 16
_TILE = 64
_FEWEST_SPREAD = 32  # tokens; a smaller mask is read whole faster than it is spread out from its offsets
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, eq=False)
class PreparedMask:
    """A mask in the kernel's layout.

    numbers: (H, …), float32, or pairs of float16 packed into int32.  grid: g of a mask stored by offset; 0 for a mask
    stored whole.  arithmetic: as requested, or float32 if a number is beyond the range of float16.
    """

    numbers: Any
    grid: int
    arithmetic: Arithmetic


def prepared_mask(mask: Any, requested: Arithmetic) -> PreparedMask:
    """Convert M (H, n, n) to Mᵀ·log2(e), stored by offset if M depends on the offset alone."""
    turned = mask.transpose(0, 2, 1) * np.float32(LOG2_E)
    numbers, grid = _laid_out(turned)
    if requested == "f32" or not np.abs(numbers).max() <= np.finfo(np.float16).max:
        return PreparedMask(numbers, grid, "f32")
    return PreparedMask(numbers.astype(np.float16).view(np.int32), grid, requested)


def takes_bias(shape: tuple[int, ...], heads: int, n: int, outer: tuple[int, ...]) -> bool:
    """Return whether the kernel takes a bias of this shape, (…, H, n, n).

    outer: the scores' dimensions between batch and heads. They share a bias, or each has its own.
    """
    windows = math.prod(shape[:-3])
    return shape[-3:] == (heads, n, n) and (windows == 1 or (windows,) == outer)


def prepared_bias(bias: Any, heads: int, n: int, outer: tuple[int, ...]) -> Any:
    """Convert B (…, H, n, n) to Bᵀ·log2(e) (windows, H, …), float32; None for a bias that the kernel does not take.

    outer: as in `takes_bias`.
    """
    if not takes_bias(bias.shape, heads, n, outer):
        return None
    windows = math.prod(bias.shape[:-3])
    turned = np.asarray(bias, np.float32).reshape(-1, n, n).transpose(0, 2, 1) * np.float32(LOG2_E)
    return _by_tiles(turned).reshape(windows, heads, -1)


def _laid_out(turned: Any) -> tuple[Any, int]:
    """Return (numbers, grid): by offset if that reproduces these masks exactly and is smaller, else whole."""
    whole = _by_tiles(turned)
    n = turned.shape[-1]
    grid = math.isqrt(n)
    if n >= _FEWEST_SPREAD and n - grid * grid in (0, 1):
        numbers = _by_offset(turned, grid)
        if numbers.size < whole.size and np.array_equal(_from_offsets(numbers, grid, n), turned):
            return numbers, grid
    return whole, 0


def _by_tiles(turned: Any) -> Any:
    """Store the masks tile by tile: each tile is (n keys, up to `_TILE` queries)."""
    heads, n, _ = turned.shape
    padded = np.zeros((heads, n, _whole(n)), np.float32)
    padded[:, :, :n] = turned
    tiles = [padded[:, :, first : first + _TILE].reshape(heads, -1) for first in range(0, n, _TILE)]
    return np.concatenate(tiles, axis=1)


def _by_offset(turned: Any, g: int) -> Any:
    """Return T of masked_attention.h, each number read from a single entry, and the class token's number behind it."""
    heads, n, _ = turned.shape
    first = n - g * g
    on_grid = turned[:, first:, first:].reshape(heads, g, g, g, g)  # rows and columns of the key, then of the query
    rows, columns = np.arange(1 - g, g)[:, None], np.arange(1 - g, g)
    apart = on_grid[:, np.maximum(-rows, 0), np.maximum(-columns, 0), np.maximum(rows, 0), np.maximum(columns, 0)]
    numbers = np.zeros((heads, _whole((2 * g - 1) ** 2 + LANES)), np.float32)
    numbers[:, : (2 * g - 1) ** 2] = apart.reshape(heads, -1)
    if first:
        numbers[:, (2 * g - 1) ** 2] = turned[:, 0, 0]
    return numbers


def _from_offsets(numbers: Any, g: int, n: int) -> Any:
    """Return the masks that the kernel computes from these numbers: (H, key, query)."""
    first = n - g * g
    turned = np.empty((len(numbers), n, n), np.float32)
    turned[:, :first, :] = turned[:, :, :first] = numbers[:, (2 * g - 1) ** 2, None, None]
    rows, columns = np.divmod(np.arange(g * g), g)
    apart = (rows - rows[:, None] + g - 1) * (2 * g - 1) + columns - columns[:, None] + g - 1
    turned[:, first:, first:] = numbers[:, apart]
    return turned


def _whole(count: int) -> int:
    """Round `count` up to a multiple of the vector width."""
    return -(-count // LANES) * LANES
