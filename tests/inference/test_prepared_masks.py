"""Masks in the form that the kernel reads: by offset exactly if a mask lies on a grid, with the same numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gmmvit_deploy.inference.prepared_masks import prepared_mask


def mask_on_grid(heads: int, n: int) -> np.ndarray:
    """Return (H, n, n): random, but equal for equal offsets in rows and columns; constant for the class token."""
    make = np.random.default_rng(n)
    g = math.isqrt(n)
    rows, columns = np.divmod(np.arange(g * g), g)
    apart = make.standard_normal((heads, 2 * g - 1, 2 * g - 1), dtype=np.float32)
    mask = np.empty((heads, n, n), np.float32)
    mask[:] = make.standard_normal((heads, 1, 1), dtype=np.float32)
    mask[:, -g * g :, -g * g :] = apart[:, rows[:, None] - rows + g - 1, columns[:, None] - columns + g - 1]
    return mask


@pytest.mark.parametrize("n", [64, 65, 196, 257])
def test_the_least_bit_in_one_place_is_another_mask(n: int) -> None:
    mask = mask_on_grid(2, n)
    grid = prepared_mask(mask, "f32")
    assert grid.grid == int(n**0.5)
    assert grid.numbers.nbytes < mask.nbytes / 3
    for place in ((1, 1, n // 2 + 2), (0, n - 1, n - 1), (1, n // 2, 3), (0, 0, 5)):
        other = mask.copy()
        other[place] = np.nextafter(other[place], np.float32(np.inf))
        whole = prepared_mask(other, "f32")
        # After multiplication by log2(e) two neighbours may become the same number, and so the same mask.
        same = np.float32(np.log2(np.e)) * other[place] == np.float32(np.log2(np.e)) * mask[place]
        assert whole.grid == (grid.grid if same else 0)
