"""Draw the masks M, by which a layer multiplies the attention scores.

Each mask is drawn as a matrix, and as a small map for each query token. White is 0, blue is positive, red is negative.
All heads of a layer have the same colour scale, so that a reader can compare the heads. The colour scale ends at the
99.5th percentile of |M|, because with a few extreme entries as the end all other entries would be pale.

A row of a mask is also drawn over the input image of the network. The opacity of the colour is proportional to
|M[i, j]|, up to the end of the colour scale.

    map[r, c] = M[i, j] for the query token i and the key token j at row r, column c;  NaN if i does not attend to j
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from gmmvit_deploy.models.families.family import Windows
from gmmvit_deploy.reports.pictures.mask_numbers import LayerMasks

_POSITIVE, _NEGATIVE = np.array([8, 64, 129]), np.array([165, 15, 21])
_GAP = 1
_STRONGEST = 0.8  # the opacity of the strongest colour; the image stays visible
_MARK = (255, 170, 0)  # also distinct from blue and red for colour-blind readers
_MARGIN, _LINE, _SMALLEST_CELL = 12, 18, 160  # sizes in a sheet, in pixels


def colour_end(values: NDArray[Any]) -> float:
    """Return the end of the colour scale of finite values: those with this or a larger size get the full colour."""
    sizes = np.abs(values)
    return (float(np.percentile(sizes, 99.5)) or float(sizes.max()) or 1.0) if sizes.size else 1.0


def coloured(values: NDArray[Any], limit: float) -> NDArray[np.uint8]:
    """Convert values (…,) to RGB colours (…, 3): white at 0, blue at +limit, red at −limit."""
    share = np.clip(np.abs(values) / limit, 0, 1)[..., None]
    end = np.where(values[..., None] >= 0, _POSITIVE, _NEGATIVE)
    mixed: NDArray[np.uint8] = (255 + (end - 255) * share).round().astype(np.uint8)
    return mixed


def matrix_image(layer: LayerMasks, head: int) -> Image.Image:
    """Draw the mask M of a head as a matrix: row i is query token i, and column j is key token j."""
    return Image.fromarray(coloured(layer.matrices[head], colour_end(layer.matrices)))


def position_maps_image(layer: LayerMasks, head: int) -> Image.Image:
    """Draw the mask M of a head as a grid of small maps: the map at the position of token i shows row i of M.

    Figure 3 of "Toward a Deeper Understanding: RetNet Viewed through Convolution" has the same form.
    """
    rows, columns = layer.grid
    return tiled(coloured(layer.matrices[head].reshape(rows, columns, rows, columns), colour_end(layer.matrices)))


def tiled(tiles: NDArray[np.uint8]) -> Image.Image:
    """Draw tiles (rows, columns, height, width, 3) as a grid of small pictures, with grey lines between the tiles."""
    rows, columns, height, width = tiles.shape[:4]
    down, right = height + _GAP, width + _GAP
    canvas = np.full((rows * down - _GAP, columns * right - _GAP, 3), 200, np.uint8)
    for row in range(rows):
        for column in range(columns):
            top, left = row * down, column * right
            canvas[top : top + height, left : left + width] = tiles[row, column]
    return Image.fromarray(canvas)


def sheet(layers: list[LayerMasks], *, title: str) -> Image.Image:
    """Draw all layers in a single picture, each as a row with the matrix and the position maps of every head."""
    pairs = [[(matrix_image(x, h), position_maps_image(x, h)) for h in range(len(x.heads))] for x in layers]
    cell = max(_SMALLEST_CELL, *(max(image.size) for row in pairs for pair in row for image in pair))
    head_width = 2 * cell + 3 * _MARGIN
    width = _MARGIN + max(len(row) for row in pairs) * head_width
    canvas = Image.new("RGB", (width, 2 * _LINE + len(layers) * (cell + 2 * _LINE + _MARGIN)), "white")
    draw = ImageDraw.Draw(canvas)
    draw.text((_MARGIN, 4), title, fill="black")
    top = 2 * _LINE
    for layer, row in zip(layers, pairs, strict=True):
        limit = colour_end(layer.matrices)
        mark = "   no influence on the logits: not exported" if layer.dead else ""
        draw.text((_MARGIN, top), f"{layer.layer}   blue +{limit:.3g}, white 0, red -{limit:.3g}{mark}", fill="black")
        for head, pair in enumerate(row):
            left = _MARGIN + head * head_width
            draw.text((left, top + _LINE), f"head {head}", fill="dimgrey")
            for side, image in enumerate(pair):
                # The factor is a whole number, so that every token has the same width in the picture.
                factor = cell // max(image.size)
                enlarged = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
                canvas.paste(enlarged, (left + side * (cell + _MARGIN), top + 2 * _LINE))
        top += cell + 2 * _LINE + _MARGIN
    return canvas


def token_map(
    layer: LayerMasks, head: int, *, row: int, column: int, windows: Windows | None = None
) -> NDArray[np.float32]:
    """Return the factors of the mask for a query token at (row, column), float32 (rows, columns).

    NaN at each token that the query token does not attend to.  windows: of the attention, or None.
    """
    if windows is None:
        rows, columns = layer.grid
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
    """Return the band of each row or column after the roll: 2 in the last window, if the roll moved it there from the
    opposite side; 1 for the rest of the last window; 0 elsewhere, and without a shift.
    """
    places = np.arange(windows.grid)
    bands = (places >= windows.grid - windows.window).astype(np.int64)
    return bands + (places >= windows.grid - windows.shift) if windows.shift else np.zeros_like(bands)


def overlay_image(
    picture: Image.Image, layer: LayerMasks, values: NDArray[np.float32], *, row: int, column: int, side: int = 384
) -> Image.Image:
    """Draw a `token_map` over the picture in grey, with NaN darkened and a frame around the query token.

    side: the minimum of the longer side in pixels.  Every token has the same number of pixels.
    """
    rows, columns = values.shape
    cell = -(-side // max(rows, columns))
    size = (columns * cell, rows * cell)
    grey = np.asarray(picture.convert("L").convert("RGB").resize(size, Image.Resampling.NEAREST), np.float64)
    limit = colour_end(layer.matrices)
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
