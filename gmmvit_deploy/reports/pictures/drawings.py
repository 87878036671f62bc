"""Collect what the report draws in addition to the masks, and draw it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gmmvit_deploy.reports.pictures.embedding_numbers import (
    FilterSheet,
    PositionSimilarity,
    filters_of,
    similarities_of,
)
from gmmvit_deploy.reports.pictures.mask_images import coloured, tiled
from gmmvit_deploy.reports.pictures.step_numbers import DrawnMatrix, Memory, Steps, colour_end, steps_of

if TYPE_CHECKING:
    from gmmvit_deploy.models.layers.model import Model

__all__ = [
    "MOST_TOKENS",
    "Drawings",
    "drawings_of",
    "every",
    "filter_images",
    "memory_image",
    "similarity_image",
    "step_image",
    "step_maps_image",
]

MOST_TOKENS = 1024
"""Larger matrices are drawn with every k-th row and column; larger grids get no map for each token."""

_CLOSED = np.array([90, 90, 90], np.uint8)
_SHEET_COLUMNS = 8
_MOST_CHANNELS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawings:
    """What the report draws in addition to the masks.

    steps: all steps on the attention scores that are no masks, and memories.  filters: the patch embedding, or None.
    positions: the similarities of the position embeddings; empty without position embeddings.
    """

    steps: Steps
    filters: FilterSheet | None
    positions: tuple[PositionSimilarity, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": self.steps.to_json(),
            "patch_filters": None if self.filters is None else self.filters.to_json(),
            "position_embeddings": [positions.to_json() for positions in self.positions],
        }


def drawings_of(model: Model) -> Drawings:
    """Return what the report draws of a trained model in addition to the masks."""
    return Drawings(steps=steps_of(model), filters=filters_of(model), positions=similarities_of(model))


def every(matrix: NDArray[np.float32]) -> int:
    """Return k: a picture of the matrix shows every k-th row and column.  k is 1 for a matrix up to 1024 × 1024."""
    return math.ceil(max(matrix.shape) / MOST_TOKENS)


def step_image(step: DrawnMatrix, index: int) -> Image.Image:
    """Draw a matrix of a step: row i is query token i (for head mixing: the old head), column j is key token j."""
    k = every(step.matrices[index])
    return Image.fromarray(_colours(step, index)[::k, ::k])


def step_maps_image(step: DrawnMatrix, index: int) -> Image.Image | None:
    """Draw a small map for each patch, as `mask_images.position_maps_image`.

    Returns None if the step does not know the grid, if the grid has a single row or column, where maps would show the
    matrix again, or if the grid has more than 1024 patches.
    """
    if step.grid is None or min(step.grid) < 2 or math.prod(step.grid) > MOST_TOKENS:
        return None
    patches = _colours(step, index)[step.prefix :, step.prefix :]
    return tiled(patches.reshape(*step.grid, *step.grid, 3))


def _colours(step: DrawnMatrix, index: int) -> NDArray[np.uint8]:
    closed = step.closed(index)
    open_entries = np.nan_to_num(np.where(closed, 0, step.matrices[index]))
    colours = coloured(open_entries, colour_end(step))
    colours[closed] = _CLOSED
    return colours


def memory_image(memory: Memory) -> Image.Image:
    """Draw the weight of a memory: white is 0, blue is positive, red is negative.

    The longer side is horizontal: a weight with more rows than columns is drawn transposed.
    """
    k = every(memory.matrix)
    matrix = np.nan_to_num(memory.matrix[::k, ::k])
    matrix = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    return Image.fromarray(coloured(matrix, float(np.percentile(np.abs(matrix), 99.5)) or 1.0))


def filter_images(sheet: FilterSheet) -> list[tuple[str, Image.Image]]:
    """Return (description, picture) for each view of the patch embedding, or for each channel.

    Three channels are drawn together as red, green and blue. Of other numbers of channels, each is drawn by itself, at
    most 8. Each filter has its own scale: for three channels grey is 0, otherwise white is 0.
    """
    channels = sheet.drawn.shape[1] // sheet.views
    pictures = []
    for view in range(sheet.views):
        of_view = np.nan_to_num(sheet.drawn[:, view * channels : (view + 1) * channels])
        where = "" if sheet.views == 1 else "the image" if view == 0 else f"shifted copy {view}"
        if channels == 3:
            largest = np.abs(of_view).max(axis=(1, 2, 3), keepdims=True)
            shades = 0.5 + 0.5 * of_view / np.where(largest > 0, largest, 1)
            tiles = (255 * shades).round().astype(np.uint8).transpose(0, 2, 3, 1)
            pictures.append((where, _sheet(tiles)))
            continue
        for channel in range(min(channels, _MOST_CHANNELS)):
            of_channel = of_view[:, channel]
            largest = np.abs(of_channel).max(axis=(1, 2), keepdims=True)
            tiles = coloured(of_channel / np.where(largest > 0, largest, 1), 1.0)
            words = [where] * bool(where) + [f"channel {channel}"] * (channels > 1)
            pictures.append((", ".join(words), _sheet(tiles)))
    return pictures


def _sheet(tiles: NDArray[np.uint8]) -> Image.Image:
    """Draw tiles (K, height, width, 3) in rows of 8."""
    columns = min(_SHEET_COLUMNS, len(tiles))
    rows = math.ceil(len(tiles) / columns)
    blank = np.full((rows * columns - len(tiles), *tiles.shape[1:]), 255, np.uint8)
    return tiled(np.concatenate([tiles, blank]).reshape(rows, columns, *tiles.shape[1:]))


def similarity_image(positions: PositionSimilarity) -> Image.Image | None:
    """Draw a small map for each patch: the cosine similarity of its position embedding to all others.

    The full colours are at ±1. Returns None for a grid of more than 1024 patches.
    """
    rows, columns = positions.grid
    if rows * columns > MOST_TOKENS:
        return None
    return tiled(coloured(positions.similarity.reshape(rows, columns, rows, columns), 1.0))
