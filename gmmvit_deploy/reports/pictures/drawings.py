"""Collect what the report draws in addition to the masks, and draw it: steps on the scores, memories, embeddings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gmmvit_deploy.reports.pages import Figure
from gmmvit_deploy.reports.pictures._embedding_numbers import (
    LARGEST_SHEET,
    FilterSheet,
    PositionSimilarity,
    filters_of,
    similarities_of,
)
from gmmvit_deploy.reports.pictures.mask_images import colour_end, coloured, tiled
from gmmvit_deploy.reports.pictures.step_numbers import (
    CLOSED,
    DrawnMatrix,
    HeadValues,
    Memory,
    Steps,
    span_of,
    steps_of,
)

if TYPE_CHECKING:
    from gmmvit_deploy.models.layers.model import Model

MAX_TOKENS = 1024
"""Larger matrices are drawn with every k-th row and column; larger grids get no map for each token."""

_CLOSED = np.array([90, 90, 90], np.uint8)
_SHEET_COLUMNS = 8
_MAX_CHANNELS = 8
_SHOWN_NAMES = 3
_OPERATIONS = {
    "add": "The matrix is added to the {}.",
    "multiply": "The matrix multiplies the {} element by element.",
    "mix": "The matrix mixes the heads of the {}: a row for each old head, a column for each new head.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawings:
    """What the report draws in addition to the masks; filters is None without filters."""

    steps: Steps
    filters: FilterSheet | None
    positions: tuple[PositionSimilarity, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A section with pictures.

    text, note: a paragraph, and one in a quiet colour.  in_columns: figures side by side, as space permits.
    """

    title: str
    text: str = ""
    note: str = ""
    figures: tuple[Figure, ...] = ()
    in_columns: bool = False


def drawings_of(model: Model) -> Drawings:
    """Return what the report draws of a trained model in addition to the masks."""
    return Drawings(steps=steps_of(model), filters=filters_of(model), positions=similarities_of(model))


def _every(matrix: NDArray[np.float32]) -> int:
    """Return k: a picture of the matrix shows every k-th row and column.  k is 1 for a matrix up to 1024 × 1024."""
    return math.ceil(int(max(matrix.shape)) / MAX_TOKENS)


def step_image(step: DrawnMatrix, index: int) -> Image.Image:
    """Draw a matrix of a step: row i is query token i (for head mixing: the old head), column j is key token j."""
    k = _every(step.matrices[index])
    return Image.fromarray(_colours(step, index)[::k, ::k])


def step_maps_image(step: DrawnMatrix, index: int) -> Image.Image | None:
    """Draw a small map for each patch, as `mask_images.position_maps_image`.

    Returns None without a grid, for a single row or column, where maps repeat the matrix, and above 1024 patches.
    """
    if step.grid is None or min(step.grid) < 2 or math.prod(step.grid) > MAX_TOKENS:
        return None
    patches = _colours(step, index)[step.prefix :, step.prefix :]
    return tiled(patches.reshape(*step.grid, *step.grid, 3))


def _colours(step: DrawnMatrix, index: int) -> NDArray[np.uint8]:
    closed = step.closed(index)
    open_entries = np.nan_to_num(np.where(closed, 0, step.matrices[index]))
    colours = coloured(open_entries, colour_end(step.open_entries))
    colours[closed] = _CLOSED
    return colours


def memory_image(memory: Memory) -> Image.Image:
    """Draw the weight of a memory, its longer side horizontal: white is 0, blue is positive, red is negative."""
    k = _every(memory.matrix)
    matrix = np.nan_to_num(memory.matrix[::k, ::k])
    matrix = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    return Image.fromarray(coloured(matrix, colour_end(matrix)))


def filter_images(sheet: FilterSheet) -> list[tuple[str, Image.Image]]:
    """Return (description, picture) for each view of the patch embedding, or for each channel, at most 8.

    Three channels are red, green and blue. Each filter has its own scale; 0 is grey for three channels, else white.
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
        for channel in range(min(channels, _MAX_CHANNELS)):
            of_channel = of_view[:, channel]
            largest = np.abs(of_channel).max(axis=(1, 2), keepdims=True)
            tiles = coloured(of_channel / np.where(largest > 0, largest, 1), 1.0)
            words = [where] * bool(where) + [f"channel {channel}"] * (channels > 1)
            pictures.append((", ".join(words), _sheet(tiles)))
    return pictures


def _sheet(tiles: NDArray[np.uint8]) -> Image.Image:
    columns = min(_SHEET_COLUMNS, len(tiles))
    rows = math.ceil(len(tiles) / columns)
    blank = np.full((rows * columns - len(tiles), *tiles.shape[1:]), 255, np.uint8)
    return tiled(np.concatenate([tiles, blank]).reshape(rows, columns, *tiles.shape[1:]))


def similarity_image(positions: PositionSimilarity) -> Image.Image | None:
    """Draw for each patch a map of its cosine similarity to all others, ±1 in full colour; None above 1024 patches."""
    rows, columns = positions.grid
    if rows * columns > MAX_TOKENS:
        return None
    return tiled(coloured(positions.similarity.reshape(rows, columns, rows, columns), 1.0))


def page_values(drawings: Drawings) -> dict[str, Any]:
    """Return the values that ``reports/templates/drawings.html`` reads."""
    return {
        "drawings": drawings,
        "step_rows": _step_rows(drawings.steps.values),
        "closed": CLOSED,
        "sections": _sections(drawings),
    }


def _sections(drawings: Drawings) -> Iterator[Drawing]:
    """Yield each step, the memories, the filters and the positions, if any; only one is in memory at a time."""
    yield from map(_draw_step, drawings.steps.drawn)
    if drawings.steps.memories:
        yield _draw_memories(drawings.steps.memories)
    if drawings.filters is not None:
        yield _draw_filters(drawings.filters)
    if drawings.positions:
        yield _draw_positions(drawings.positions)


def _step_rows(values: tuple[HeadValues, ...]) -> list[tuple[str, ...]]:
    """Return (attentions, step, quantity, numbers) of each step with a number for each head, as text."""
    return [
        (
            _named(step.attentions),
            step.name,
            f"{step.operation}: {quantity}",
            ", ".join(f"{number:.4g}" for number in numbers),
        )
        for step in values
        for quantity, numbers in step.values.items()
    ]


def _named(attentions: tuple[str, ...]) -> str:
    shown = ", ".join(attentions[:_SHOWN_NAMES])
    more = len(attentions) - _SHOWN_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def _step_title(step: DrawnMatrix) -> str:
    """Return a title such as ``Decay before softmax: blocks.0.attention`` for the step ``before.decay``."""
    when, _, name = step.name.partition(".")
    return f"{name.replace('_', ' ').capitalize()} {when} softmax: {step.attentions[0]}"


def _draw_step(step: DrawnMatrix) -> Drawing:
    rows, columns = step.matrices.shape[1:]
    size = f"{rows}×{columns} {'heads' if step.operation == 'mix' else 'tokens'}"
    if step.prefix:
        size += f", with {step.prefix} prefix tokens that have no map"
    k = _every(step.matrices[0])
    thinned = f"; of {k} neighbouring rows or columns, only the first is drawn" if k > 1 else ""
    windows = f"; {step.windows} windows, of which the first and the last are drawn" if step.windows > 1 else ""
    what = _OPERATIONS[step.operation].format("scores" if step.name.startswith("before.") else "weights after softmax")
    same = f" The same step is in {_named(step.attentions[1:])}." if len(step.attentions) > 1 else ""
    return Drawing(
        title=_step_title(step),
        text=what + same,
        note=f"{size}; full colour at ±{colour_end(step.open_entries):.3g}{windows}{thinned}",
        figures=tuple(_step_figure(step, index) for index in range(len(step.labels))),
        in_columns=True,
    )


def _step_figure(step: DrawnMatrix, index: int) -> Figure:
    where = f"{step.attentions[0]} {step.name}, {step.labels[index]}"
    pictures = [(f"{where}: matrix", step_image(step, index))]
    maps = step_maps_image(step, index)
    if maps is not None:
        pictures.append((f"{where}: a map for each token", maps))
    measured = step.measured(index)
    span = "" if measured["smallest"] is None else f"{measured['smallest']:.3g} to {measured['largest']:.3g}"
    closed = f"{measured['closed']} entries without weight" if measured["closed"] else ""
    caption = "; ".join(part for part in (span, closed) if part)
    return Figure(step.labels[index], (caption,), tuple(pictures), layout="single" if maps is None else "pair")


def _draw_memories(memories: tuple[Memory, ...]) -> Drawing:
    return Drawing(
        title="Memories of attentions without Q Kᵀ",
        note="A memory is a trained linear layer in place of keys or values. The matrix is the weight of the layer, "
        "with the longer side from left to right. White is 0, blue is positive, red is negative; each memory has a "
        "scale of its own.",
        figures=tuple(map(_memory_figure, memories)),
        in_columns=True,
    )


def _memory_figure(memory: Memory) -> Figure:
    measured = span_of(memory.matrix)
    outputs, inputs = memory.matrix.shape
    axes = "a column for each output" if outputs > inputs else "a row for each output"
    span = "" if measured["smallest"] is None else f"; {measured['smallest']:.3g} to {measured['largest']:.3g}"
    picture = (f"{memory.name}: matrix of the memory", memory_image(memory))
    return Figure(memory.name, (f"{outputs} outputs, {inputs} inputs; {axes}{span}",), (picture,), layout="single")


def _draw_filters(sheet: FilterSheet) -> Drawing:
    channels, rows, columns = sheet.drawn.shape[1:]
    kind = "filters" if sheet.explained is None else "principal components of the filters"
    if sheet.explained is not None:
        what = (
            f"The first {len(sheet.drawn)} principal components of the {sheet.features} filters, largest variance "
            f"first. They hold {sheet.explained:.1%} of the variance of the filters."
        )
    elif sheet.features > len(sheet.drawn):
        what = f"The first {LARGEST_SHEET} of the {sheet.features} filters."
    else:
        what = f"The {sheet.features} filters."
    scale = "grey is 0" if channels == 3 * sheet.views else "white is 0, blue is positive, red is negative"
    figures = []
    for where, image in filter_images(sheet):
        alt = f"{sheet.name}: {len(sheet.drawn)} {kind}" + (f", {where}" if where else "")
        figures.append(Figure(where or sheet.name, (), ((alt, image),), layout="sheet", all_colours=True))
    return Drawing(
        title="Patch embedding",
        text=what,
        note=f"{sheet.name}: filters of {rows}×{columns} pixels and {channels} channels. Each filter has a scale of "
        f"its own: {scale}.",
        figures=tuple(figures),
    )


def _draw_positions(similarities: tuple[PositionSimilarity, ...]) -> Drawing:
    return Drawing(
        title="Position embeddings",
        note="The map at the position of a patch shows the cosine similarity of its position embedding to all others. "
        "White is 0, full blue is 1, full red is −1.",
        figures=tuple(map(_similarity_figure, similarities)),
    )


def _similarity_figure(positions: PositionSimilarity) -> Figure:
    rows, columns = positions.grid
    image = similarity_image(positions)
    measured = positions.measured()
    parts = [f"{rows}×{columns} patches"]
    if not positions.stored:
        parts.append("computed from the sizes of the model, and not stored in the checkpoint")
    if image is None:
        parts.append(f"not drawn, because the grid has more than {MAX_TOKENS} patches")
    if measured["neighbours"] is not None:
        parts.append(f"neighbours: {measured['neighbours']:.3g} on average")
    if measured["mean"] is not None:
        parts.append(
            f"all pairs: {measured['mean']:.3g} on average, {measured['smallest']:.3g} to {measured['largest']:.3g}"
        )
    parts += [
        f"prefix token {token}, which has no map: {float(row.mean()):.3g} to the patches on average"
        for token, row in enumerate(positions.to_prefix)
    ]
    alt = f"{positions.name}: cosine similarity of each position embedding to all others"
    return Figure(positions.name, ("; ".join(parts),), () if image is None else ((alt, image),), layout="sheet")
