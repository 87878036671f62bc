"""A mask over an image: the right row at the right place, in windows too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from gmmvit_deploy.models.families.family import Windows
from gmmvit_deploy.models.scores.biases import shift_mask
from gmmvit_deploy.reports.pictures.mask_images import overlay_image, token_grid, token_map
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


def test_overlay_colours_what_the_mask_lets_through() -> None:
    masks = layer(4)
    masks.matrices[0][:] = 0
    masks.matrices[0][5, [0, 1]] = (1, -1)
    values = token_map(masks, 0, row=1, column=1)
    values[3, 3] = np.nan
    image = np.asarray(
        overlay_image(Image.new("RGB", (8, 8), (100, 100, 100)), masks, values, row=1, column=1, side=80)
    )
    assert image.shape == (80, 80, 3)
    blue, red, plain, dark = image[10, 10], image[10, 30], image[10, 70], image[70, 70]
    assert blue[2] > blue[0]
    assert red[0] > red[2]
    assert plain.tolist() == [100, 100, 100]
    assert dark.tolist() == [25, 25, 25]
    assert image[20, 20].tolist() == [255, 170, 0]
    assert token_grid(masks, None) == (4, 4)
    assert token_grid(masks, Windows(grid=8, window=4, shift=0)) == (8, 8)
