"""Masks as `masked_attention.c` reads them.  Imports nothing of ours: a server's model brings this file along.

A Gaussian mixture over token distances depends on nothing but how many rows and columns apart two tokens are. So of
g × g tokens a mask holds (2g − 1)² different numbers a head and not g⁴; laid out as `masked_attention.h` says, it is
g/2 times smaller than M, and fits the cache that M does not fit. Which it is, its numbers say; learned masks are not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

__all__ = ["LANES", "LOG2_E", "Arithmetic", "PreparedMask", "prepared_mask"]

Arithmetic = Literal["f32", "bf16"]
LANES = 16
_TILE = 64
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, eq=False)
class PreparedMask:
    """numbers: (H, …), float32, or two of float16 as one int32.  grid: 0 for a mask that is on none.

    arithmetic: the one that was wanted, or float32 where a number is beyond float16.
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


def _laid_out(turned: Any) -> tuple[Any, int]:
    """(numbers, grid): by offset if that gives these masks back, number for number, and is smaller; else whole."""
    whole = _by_tiles(turned)
    n = turned.shape[-1]
    grid = math.isqrt(n)
    if n - grid * grid in (0, 1):
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
    """W of masked_attention.h, of which every number is read off one place."""
    heads, n, _ = turned.shape
    first = n - g * g
    on_grid = turned[:, first:, first:].reshape(heads, g, g, g, g)  # rows and columns of the key, then of the query
    apart = np.arange(1 - g, g)
    wide = on_grid[:, np.maximum(-apart, 0), :, np.maximum(apart, 0), :]  # (2g − 1, H, column of key, of query)
    numbers = np.zeros((heads, _class_numbers(g) + first * _whole(n)), np.float32)
    numbers[:, first : first + g * g * (2 * g - 1)] = wide.transpose(1, 2, 0, 3).reshape(heads, -1)
    if first:
        numbers[:, _class_numbers(g) :] = turned[:, 0, :1]
    return numbers


def _from_offsets(numbers: Any, g: int, n: int) -> Any:
    """As the kernel reads it: (H, key, query)."""
    first = n - g * g
    turned = np.empty((len(numbers), n, n), np.float32)
    turned[:, :first, :] = turned[:, :, :first] = numbers[:, -1:, None]
    for key in range(g * g):
        start = first + key % g * (2 * g - 1) * g + (g - 1 - key // g) * g
        turned[:, first + key, first:] = numbers[:, start : start + g * g]
    return turned


def _class_numbers(g: int) -> int:
    return _whole(g * g * (2 * g - 1) + LANES)


def _whole(n: int) -> int:
    """So many numbers in whole vectors."""
    return -(-n // LANES) * LANES
