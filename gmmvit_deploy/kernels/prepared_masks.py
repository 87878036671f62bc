"""Masks and biases as `masked_attention.c` reads them.  Imports nothing of ours: a server's model brings it along.

A Gaussian mixture over token distances depends on nothing but how many rows and columns apart two tokens are. So of
g × g tokens a mask holds (2g − 1)² different numbers a head and not g⁴; no more than those come from memory then, as
`masked_attention.h` says. Which it is, its numbers say; learned masks are not.
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
_FEWEST_SPREAD = 32  # tokens; of fewer a mask is so small that reading it whole takes less than spreading it out
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, eq=False)
class PreparedMask:
    """numbers: (H, …), float32, or two of float16 as one int32.  grid: 0 for a mask that is on none.

    arithmetic: as requested, or float32 where a number is beyond float16.
    """

    numbers: Any
    grid: int
    arithmetic: Arithmetic


def prepared_mask(mask: Any, wanted: Arithmetic) -> PreparedMask:
    """M (H, n, n) → Mᵀ·log2(e), by offset where that is all it depends on."""
    turned = mask.transpose(0, 2, 1) * np.float32(LOG2_E)
    numbers, grid = _laid_out(turned)
    if wanted == "f32" or not np.abs(numbers).max() <= np.finfo(np.float16).max:
        return PreparedMask(numbers, grid, "f32")
    return PreparedMask(numbers.astype(np.float16).view(np.int32), grid, wanted)


def takes_bias(shape: tuple[int, ...], heads: int, n: int, outer: tuple[int, ...]) -> bool:
    """Does the kernel take a bias of this shape, (…, H, n, n)?

    outer: the scores' dimensions between batch and heads. A bias is the same for all of them, or there is one each.
    """
    windows = math.prod(shape[:-3])
    return shape[-3:] == (heads, n, n) and (windows == 1 or (windows,) == outer)


def prepared_bias(bias: Any, heads: int, n: int, outer: tuple[int, ...]) -> Any:
    """B (…, H, n, n) → Bᵀ·log2(e) (windows, H, …), float32; None for a bias that the kernel does not take.

    outer: as in `takes_bias`.
    """
    if not takes_bias(bias.shape, heads, n, outer):
        return None
    windows = math.prod(bias.shape[:-3])
    turned = np.asarray(bias, np.float32).reshape(-1, n, n).transpose(0, 2, 1) * np.float32(LOG2_E)
    return _by_tiles(turned).reshape(windows, heads, -1)


def _laid_out(turned: Any) -> tuple[Any, int]:
    """(numbers, grid): by offset if that gives these masks back, number for number, and is smaller; else whole."""
    whole = _by_tiles(turned)
    n = turned.shape[-1]
    grid = math.isqrt(n)
    if n >= _FEWEST_SPREAD and n - grid * grid in (0, 1):
        numbers = _by_offset(turned, grid)
        if numbers.size < whole.size and np.array_equal(_from_offsets(numbers, grid, n), turned):
            return numbers, grid
    return whole, 0


def _by_tiles(turned: Any) -> Any:
    """One tile of queries after the other, each (n, its queries)."""
    heads, n, _ = turned.shape
    padded = np.zeros((heads, n, _whole(n)), np.float32)
    padded[:, :, :n] = turned
    tiles = [padded[:, :, first : first + _TILE].reshape(heads, -1) for first in range(0, n, _TILE)]
    return np.concatenate(tiles, axis=1)


def _by_offset(turned: Any, g: int) -> Any:
    """T of masked_attention.h, of which every number is read off one place, and the class token's."""
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
    """What the kernel makes of it: (H, key, query)."""
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
