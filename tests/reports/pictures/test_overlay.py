"""A mask over an image: the right row at the right place, in windows too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gmmvit_deploy.models.families.family import Windows
from gmmvit_deploy.models.scores.biases import shift_mask
from gmmvit_deploy.reports.pictures.mask_images import token_map
from gmmvit_deploy.reports.pictures.mask_numbers import HeadNumbers, LayerMasks

_NUMBERS = HeadNumbers(within=(0, 0, 0), itself=0, negative=0, smallest=0, largest=0, dead=(), alpha=(), sigma=())


def layer(grid: int, heads: int = 1) -> LayerMasks:
    """Return a mask with a distinct number for each head, i and j."""
    n = grid**2
    matrices = np.arange(1, heads * n * n + 1, dtype=np.float32).reshape(heads, n, n)
    return LayerMasks(layer="a", grid=(grid, grid), matrices=matrices, heads=(_NUMBERS,) * heads, underflowed=None)


@pytest.mark.parametrize("shift", [0, 2])
def test_map_within_windows_is_what_the_attention_lets_through(shift: int) -> None:
    """Compare with the model's own steps: roll, divide into windows, mask tokens that only the roll put together."""
    grid, window = 8, 4
    side = grid // window
    masks, windows = layer(window), Windows(grid=grid, window=window, shift=shift)
    outside = shift_mask(grid, window, shift).numpy() if shift else np.zeros((side**2, window**2, window**2))
    places = torch.arange(grid**2).reshape(grid, grid).roll((-shift, -shift), dims=(0, 1))
    members = places.reshape(side, window, side, window).transpose(1, 2).reshape(side**2, window**2).numpy()
    for number, tokens in enumerate(members):
        for i, token in enumerate(tokens):
            expected = np.full(grid**2, np.nan, np.float32)
            seen = outside[number, i] == 0
            expected[tokens[seen]] = masks.matrices[0][i][seen]
            row, column = divmod(int(token), grid)
            values = token_map(masks, 0, row=row, column=column, windows=windows)
            assert np.array_equal(values.reshape(-1), expected, equal_nan=True)
