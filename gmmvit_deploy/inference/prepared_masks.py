"""Convert masks and biases to the memory layouts that `attention_on_vectors.h` reads.

An entry of a Gaussian mixture mask depends only on the offset between two tokens: how many rows and columns the two
tokens are apart on the grid. A mask over g × g tokens therefore has (2g − 1)² different entries per head instead of
g⁴, and the kernel reads only these different entries from memory (see `masked_attention.h`).

The code compares the entries of a mask to choose the layout. A mask whose entries depend on nothing but the
offset is stored by offset; every other mask, for example a learned mask, is stored whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .precision import Arithmetic

LANES = 16
"""The number of float32 values in a vector register."""
_TILE = 64
_MIN_SPREAD = 32  # tokens; for fewer tokens, the kernel reads a whole mask faster than a mask stored by offset
LOG2_E = 1.4426950408889634
"""The factor log2(e).  The kernel computes exp(x) as 2^(x · log2(e))."""


@dataclass(frozen=True, eq=False)
class PreparedMask:
    """A mask in the kernel's layout.

    numbers: the entries (H, …), or (1, …) for all heads, in float32, or pairs of float16 entries packed into int32.
    grid: the side g of the grid for a mask stored by offset; 0 for a mask stored whole.
    arithmetic: the requested type, or float32 if an entry is beyond the range of float16.
    """

    numbers: Any
    grid: int
    arithmetic: Arithmetic


def prepared_mask(mask: Any, requested: Arithmetic) -> PreparedMask:
    """Convert M (H, q, n), or (1, q, n) for all heads, to Mᵀ·log2(e), by offset if it depends on nothing else."""
    turned = mask.transpose(0, 2, 1) * np.float32(LOG2_E)
    numbers, grid = _laid_out(turned)
    if requested == "f32" or not np.abs(numbers).max() <= np.finfo(np.float16).max:
        return PreparedMask(numbers, grid, "f32")
    return PreparedMask(numbers.astype(np.float16).view(np.int32), grid, requested)


def takes_bias(shape: tuple[int, ...], heads: int, tokens: tuple[int, int], outer: tuple[int, ...]) -> bool:
    """Return whether the kernel supports a bias of this shape: (…, H, q, n), or (q, n) for all heads.

    tokens: (q, n).  outer: (number of windows,), or (): windows share a bias, or each has its own.
    """
    if shape == tokens:
        return True
    windows = math.prod(shape[:-3])
    return shape[-3:] == (heads, *tokens) and (windows == 1 or (windows,) == outer)


def prepared_bias(bias: Any, heads: int, tokens: tuple[int, int]) -> Any:
    """Convert B, as in `takes_bias`, to Bᵀ·log2(e), (windows, H or 1, …) in float32."""
    windows = math.prod(bias.shape[:-3])
    turned = np.asarray(bias, np.float32).reshape(-1, *tokens).transpose(0, 2, 1) * np.float32(LOG2_E)
    return _by_tiles(turned).reshape(windows, heads if bias.ndim > 2 else 1, -1)


def _laid_out(turned: Any) -> tuple[Any, int]:
    """Return (entries, grid) of masks (H, key, query), stored by offset if that layout is exact and smaller."""
    whole = _by_tiles(turned)
    n, queries = turned.shape[1:]
    grid = math.isqrt(n)
    if n == queries and n >= _MIN_SPREAD and n - grid * grid in (0, 1):
        numbers = _by_offset(turned, grid)
        if numbers.size < whole.size and np.array_equal(_from_offsets(numbers, grid, n), turned):
            return numbers, grid
    return whole, 0


def _by_tiles(turned: Any) -> Any:
    """Store the masks tile by tile.  A tile has n keys and at most `_TILE` queries."""
    heads, n, queries = turned.shape
    padded = np.zeros((heads, n, _whole(queries)), np.float32)
    padded[:, :, :queries] = turned
    tiles = [padded[:, :, first : first + _TILE].reshape(heads, -1) for first in range(0, queries, _TILE)]
    return np.concatenate(tiles, axis=1)


def _by_offset(turned: Any, g: int) -> Any:
    """Return the table T of masked_attention.h, each entry from one of the mask, and the entry of the class token."""
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
    """Return the masks (H, key, query) that the kernel computes from the entries stored by offset."""
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
