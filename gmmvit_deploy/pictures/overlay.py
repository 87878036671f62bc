"""One row of a mask, laid over the image that the network sees.

map[r, c] = M[i, j] for the token i that asks and the token j at row r, column c;  NaN where i sees no token

White is 0, blue above, red below, as in `mask_images`; the strength of the colour is |M[i, j]| over the layer's limit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from gmmvit_deploy.families.family import Windows
from gmmvit_deploy.pictures.mask_images import colour_limit, coloured
from gmmvit_deploy.pictures.mask_numbers import LayerMasks

__all__ = ["overlay_image", "token_grid", "token_map"]

_STRONGEST = 0.8  # share of the colour over a pixel at full strength: the image stays visible
_MARK = (255, 170, 0)  # apart from blue and red for every kind of colour vision


def token_grid(layer: LayerMasks, windows: Windows | None) -> int:
    """Tokens along one side of the image."""
    return layer.grid if windows is None else windows.grid


def token_map(
    layer: LayerMasks, head: int, *, row: int, column: int, windows: Windows | None = None
) -> NDArray[np.float32]:
    """The row of the mask of ``head`` that belongs to the token at ``row``, ``column``, as a map over all tokens.

    windows: how the attention divides the tokens, None where each token sees all.  Returns float32 (grid, grid), NaN
    at tokens that the asking token does not see.
    Errors: IndexError outside the grid or the heads.
    """
    grid = token_grid(layer, windows)
    if not (0 <= row < grid and 0 <= column < grid and 0 <= head < len(layer.heads)):
        raise IndexError(f"head {head}, token {row}, {column}: outside {len(layer.heads)} heads, {grid}×{grid} tokens")
    if windows is None:
        whole: NDArray[np.float32] = layer.matrices[head][row * grid + column].reshape(grid, grid).copy()
        return whole
    rolled = np.full((grid, grid), np.nan, np.float32)
    rolled_row, rolled_column = (row - windows.shift) % grid, (column - windows.shift) % grid
    top, left = (place // windows.window * windows.window for place in (rolled_row, rolled_column))
    token = (rolled_row - top) * windows.window + rolled_column - left
    bottom, right = top + windows.window, left + windows.window
    rolled[top:bottom, left:right] = layer.matrices[head][token].reshape(windows.window, windows.window)
    # The shift mask parts what the roll has brought together from opposite sides of the image.
    bands = _bands(windows)
    apart = (bands[:, None] != bands[rolled_row]) | (bands[None, :] != bands[rolled_column])
    rolled[apart] = np.nan
    return np.roll(rolled, (windows.shift, windows.shift), axis=(0, 1))


def _bands(windows: Windows) -> NDArray[np.int64]:
    """Band of each rolled row or column: untouched windows, the rest of the last window, what was rolled over."""
    places = np.arange(windows.grid)
    bands = (places >= windows.grid - windows.window).astype(np.int64)
    return bands + (places >= windows.grid - windows.shift) if windows.shift else np.zeros_like(bands)


def overlay_image(
    picture: Image.Image, layer: LayerMasks, values: NDArray[np.float32], *, row: int, column: int, side: int = 384
) -> Image.Image:
    """The map of `token_map` over the picture in grey; tokens that are not seen are darkened, the asking token framed.

    values: (grid, grid).  side: least side of the result in pixels.  Returns an RGB image, the same number of pixels
    for every token.
    """
    grid = len(values)
    cell = -(-side // grid)
    size = (grid * cell, grid * cell)
    grey = np.asarray(picture.convert("L").convert("RGB").resize(size, Image.Resampling.NEAREST), np.float64)
    limit = colour_limit(layer)
    seen = np.nan_to_num(values).repeat(cell, axis=0).repeat(cell, axis=1)
    unseen = np.isnan(values).repeat(cell, axis=0).repeat(cell, axis=1)
    strength = _STRONGEST * np.clip(np.abs(seen) / limit, 0, 1)[..., None]
    full_colour = coloured(np.sign(seen), 1.0)
    mixed = grey * (1 - strength) + full_colour * strength
    mixed[unseen] *= 0.25
    image = Image.fromarray(mixed.round().astype(np.uint8))
    left, top = column * cell, row * cell
    ImageDraw.Draw(image).rectangle(
        (left, top, left + cell - 1, top + cell - 1), outline=_MARK, width=max(2, cell // 8)
    )
    return image
