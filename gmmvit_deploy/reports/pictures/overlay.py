"""Draw a row of a mask M over the input image of the network.

    map[r, c] = M[i, j] for the query token i and the key token j at row r, column c;  NaN if i does not attend to j

White is 0, blue is positive, red is negative, as in `mask_images`. The opacity of the colour is proportional to
|M[i, j]|, up to `colour_limit` of the layer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from gmmvit_deploy.models.families.family import Windows
from gmmvit_deploy.reports.pictures.mask_images import colour_limit, coloured
from gmmvit_deploy.reports.pictures.mask_numbers import LayerMasks

__all__ = ["overlay_image", "token_grid", "token_map"]

_STRONGEST = 0.8  # the opacity of the strongest colour; the image stays visible
_MARK = (255, 170, 0)  # also distinct from blue and red for colour-blind readers


def token_grid(layer: LayerMasks, windows: Windows | None) -> tuple[int, int]:
    """Return the grid of tokens over the image: (rows, columns)."""
    return layer.grid if windows is None else (windows.grid, windows.grid)


def token_map(
    layer: LayerMasks, head: int, *, row: int, column: int, windows: Windows | None = None
) -> NDArray[np.float32]:
    """Return a map of the factors by which the mask of ``head`` multiplies the scores of a query token.

    row, column: the position of the query token.
    windows: the windows into which the attention divides the tokens; None if the attention has no windows.
    Returns float32 (rows, columns), with the factor at each key token, and NaN at each token that the query token does
    not attend to.
    Errors: IndexError when the query token is outside the grid, or when the head does not exist.
    """
    rows, columns = token_grid(layer, windows)
    if not (0 <= row < rows and 0 <= column < columns and 0 <= head < len(layer.heads)):
        raise IndexError(
            f"expected a head below {len(layer.heads)} and a token in the {rows}×{columns} grid, "
            f"got head {head} and the token at row {row}, column {column}"
        )
    if windows is None:
        whole: NDArray[np.float32] = layer.matrices[head][row * columns + column].reshape(rows, columns).copy()
        return whole
    grid = windows.grid
    rolled = np.full((grid, grid), np.nan, np.float32)
    rolled_row, rolled_column = (row - windows.shift) % grid, (column - windows.shift) % grid
    top, left = (place // windows.window * windows.window for place in (rolled_row, rolled_column))
    token = (rolled_row - top) * windows.window + rolled_column - left
    bottom, right = top + windows.window, left + windows.window
    rolled[top:bottom, left:right] = layer.matrices[head][token].reshape(windows.window, windows.window)
    # The network's shift mask separates tokens that are in the same window only because of the roll.
    bands = _bands(windows)
    apart = (bands[:, None] != bands[rolled_row]) | (bands[None, :] != bands[rolled_column])
    rolled[apart] = np.nan
    return np.roll(rolled, (windows.shift, windows.shift), axis=(0, 1))


def _bands(windows: Windows) -> NDArray[np.int64]:
    """Return the band (0, 1 or 2) of each row or column after the roll.

    Band 0 contains the windows before the last window. Band 2 contains the rows or columns that the roll moved from the
    opposite side into the last window. Band 1 contains the rest of the last window. Without a shift every band is 0.
    """
    places = np.arange(windows.grid)
    bands = (places >= windows.grid - windows.window).astype(np.int64)
    return bands + (places >= windows.grid - windows.shift) if windows.shift else np.zeros_like(bands)


def overlay_image(
    picture: Image.Image, layer: LayerMasks, values: NDArray[np.float32], *, row: int, column: int, side: int = 384
) -> Image.Image:
    """Draw the result of `token_map` over the picture, which is converted to grey.

    Tokens whose value is NaN are darkened, and the query token gets a frame.
    values: the result of `token_map`, (rows, columns).  row, column: the position of the query token.
    side: the minimum of the longer side of the result, in pixels.
    Returns an RGB image with the same number of pixels for every token.
    """
    rows, columns = values.shape
    cell = -(-side // max(rows, columns))
    size = (columns * cell, rows * cell)
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
