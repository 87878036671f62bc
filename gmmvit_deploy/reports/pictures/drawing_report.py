"""Show the steps on the attention scores, the patch embedding and the position embeddings on the page of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from html import escape

from gmmvit_deploy.reports.pages import section, table
from gmmvit_deploy.reports.pictures.drawings import (
    MOST_TOKENS,
    Drawings,
    every,
    filter_images,
    memory_image,
    similarity_image,
    step_image,
    step_maps_image,
)
from gmmvit_deploy.reports.pictures.embedding_numbers import LARGEST_SHEET, FilterSheet, PositionSimilarity
from gmmvit_deploy.reports.pictures.inline import inline_image
from gmmvit_deploy.reports.pictures.step_numbers import CLOSED, DrawnMatrix, HeadValues, Memory, Steps, colour_end

__all__ = ["DRAWING_STYLE", "drawing_parts", "drawing_sections", "steps_in_numbers", "steps_legend"]

DRAWING_STYLE = """
.single img, .sheet img { image-rendering: pixelated; border: 1px solid var(--line); background: #ffffff; }
.single img { width: 100%; max-width: 17rem; }
.sheet img { width: 100%; max-width: 36rem; }
"""

_SHOWN_NAMES = 3
_OPERATIONS = {
    "add": "The matrix is added to the {}.",
    "multiply": "The matrix multiplies the {} element by element.",
    "mix": "The matrix mixes the heads of the {}: a row for each old head, a column for each new head.",
}


def drawing_sections(drawings: Drawings) -> Iterator[str]:
    """Yield the sections of the report, as HTML."""
    yield section("Other steps on the attention scores", steps_legend(drawings.steps), steps_in_numbers(drawings.steps))
    for title, content in drawing_parts(drawings):
        yield section(title, content())


def drawing_parts(drawings: Drawings) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield (title, content) of each part with pictures: each step, the memories, the filters, the positions.

    title: plain text.  content: a function that draws the part, and returns HTML.
    """
    for step in drawings.steps.drawn:
        yield f"{step.attentions[0]} {step.name}", partial(_step, step)
    if drawings.steps.memories:
        yield "Memories of attentions without Q Kᵀ", partial(_memories, drawings.steps.memories)
    yield "Patch embedding", partial(_filters, drawings.filters)
    yield "Position embeddings", partial(_positions, drawings.positions)


def steps_legend(steps: Steps) -> str:
    """Return the explanation of the pictures of steps, as HTML."""
    if not steps.drawn:
        return "<p>No other step has a matrix with an entry for each pair of tokens or heads.</p>"
    return (
        '<p class="quiet">In a matrix of tokens, each query token has a row, and each key token has a column. The map '
        "at the position of a query token shows the same row. White is 0, blue is positive, red is negative, on the "
        f"same scale for all pictures of a step. Grey entries of at most {CLOSED:.3g} are added to the scores: in "
        "float32, such a key token gets no weight. Attentions with equal steps share the pictures.</p>"
    )


def steps_in_numbers(steps: Steps) -> str:
    """Return the steps with a number for each head, and the steps without a picture, as HTML; "" without such steps."""
    return _values(steps.values) + _omitted(steps)


def _values(values: tuple[HeadValues, ...]) -> str:
    rows = [
        (
            escape(_named(step.attentions)),
            escape(step.name),
            f"{step.operation}: {quantity}",
            ", ".join(f"{number:.4g}" for number in numbers),
        )
        for step in values
        for quantity, numbers in step.values.items()
    ]
    if not rows:
        return ""
    head = ("attention", "step", "quantity", "value of each head, or of all heads")
    return table("Steps with a number for each head", head, rows)


def _omitted(steps: Steps) -> str:
    lines = "".join(f"<li>{escape(name)}, not drawn: {escape(why)}</li>" for name, why in steps.omitted.items())
    return f"<ul>{lines}</ul>" if lines else ""


def _named(attentions: tuple[str, ...]) -> str:
    """Return the names of attentions, at most three and the number of further attentions."""
    shown = ", ".join(attentions[:_SHOWN_NAMES])
    more = len(attentions) - _SHOWN_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def _step(step: DrawnMatrix) -> str:
    rows, columns = step.matrices.shape[1:]
    size = f"{rows}×{columns} {'heads' if step.operation == 'mix' else 'tokens'}"
    if step.prefix:
        size += f", with {step.prefix} prefix tokens that have no map"
    k = every(step.matrices[0])
    thinned = f"; of {k} neighbouring rows or columns, only the first is drawn" if k > 1 else ""
    windows = f"; {step.windows} windows, of which the first and the last are drawn" if step.windows > 1 else ""
    what = _OPERATIONS[step.operation].format("scores" if step.name.startswith("before.") else "weights after softmax")
    same = f" The same step is in {_named(step.attentions[1:])}." if len(step.attentions) > 1 else ""
    figures = "".join(_figure(step, index) for index in range(len(step.labels)))
    return (
        f"<p>{escape(what + same)}</p>"
        f'<p class="quiet">{size}; full colour at ±{colour_end(step):.3g}{windows}{thinned}</p>'
        f'<div class="heads">{figures}</div>'
    )


def _figure(step: DrawnMatrix, index: int) -> str:
    where = f"{step.attentions[0]} {step.name}, {step.labels[index]}"
    matrix = inline_image(step_image(step, index), alt=f"{where}: matrix")
    maps = step_maps_image(step, index)
    if maps is None:
        pictures = f'<div class="single">{matrix}</div>'
    else:
        pictures = f'<div class="pair">{matrix}{inline_image(maps, alt=f"{where}: a map for each token")}</div>'
    measured = step.measured(index)
    span = "" if measured["smallest"] is None else f"{measured['smallest']:.3g} to {measured['largest']:.3g}"
    closed = f"{measured['closed']} entries without weight" if measured["closed"] else ""
    caption = "; ".join(part for part in (span, closed) if part)
    return f"<figure>{pictures}<figcaption><b>{escape(step.labels[index])}</b>{caption}</figcaption></figure>"


def _memories(memories: tuple[Memory, ...]) -> str:
    figures = "".join(_memory(memory) for memory in memories)
    return (
        '<p class="quiet">A memory is a trained linear layer in place of keys or values. The matrix is the weight of '
        "the layer, with the longer side from left to right. White is 0, blue is positive, red is negative; each "
        "memory has a scale of its own.</p>"
        f'<div class="heads">{figures}</div>'
    )


def _memory(memory: Memory) -> str:
    measured = memory.to_json()
    outputs, inputs = memory.matrix.shape
    axes = "a column for each output" if outputs > inputs else "a row for each output"
    span = "" if measured["smallest"] is None else f"; {measured['smallest']:.3g} to {measured['largest']:.3g}"
    picture = inline_image(memory_image(memory), alt=f"{memory.name}: matrix of the memory")
    return (
        f'<figure><div class="single">{picture}</div>'
        f"<figcaption><b>{escape(memory.name)}</b>{outputs} outputs, {inputs} inputs; {axes}{span}</figcaption>"
        "</figure>"
    )


def _filters(sheet: FilterSheet | None) -> str:
    if sheet is None:
        return (
            "<p>There is no picture of the patch embedding: no convolution reads the channels of the image directly, "
            "and the model declares no linear layer on patches.</p>"
        )
    channels, rows, columns = sheet.drawn.shape[1:]
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
    pictures = filter_images(sheet)
    drawn = "".join(
        f'<figure><div class="sheet">{inline_image(image, alt=_filter_alt(sheet, where), all_colours=True)}</div>'
        f"<figcaption><b>{escape(where or sheet.name)}</b></figcaption></figure>"
        for where, image in pictures
    )
    return (
        f"<p>{what}</p>"
        f'<p class="quiet">{escape(sheet.name)}: filters of {rows}×{columns} pixels and {channels} channels. Each '
        f"filter has a scale of its own: {scale}.</p>{drawn}"
    )


def _filter_alt(sheet: FilterSheet, where: str) -> str:
    kind = "filters" if sheet.explained is None else "principal components of the filters"
    return f"{sheet.name}: {len(sheet.drawn)} {kind}" + (f", {where}" if where else "")


def _positions(similarities: tuple[PositionSimilarity, ...]) -> str:
    if not similarities:
        return (
            "<p>There is no picture of the position embeddings: no parameter or buffer with a usual name holds an "
            "embedding for each patch of a grid.</p>"
        )
    legend = (
        '<p class="quiet">The map at the position of a patch shows the cosine similarity of its position embedding to '
        "all others. White is 0, full blue is 1, full red is −1.</p>"
    )
    return legend + "".join(map(_similarity, similarities))


def _similarity(positions: PositionSimilarity) -> str:
    rows, columns = positions.grid
    image = similarity_image(positions)
    measured = positions.measured()
    parts = [f"{rows}×{columns} patches"]
    if not positions.stored:
        parts.append("computed from the sizes of the model, and not stored in the checkpoint")
    if image is None:
        parts.append(f"not drawn, because the grid has more than {MOST_TOKENS} patches")
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
    picture = "" if image is None else f'<div class="sheet">{inline_image(image, alt=alt)}</div>'
    return f"<figure>{picture}<figcaption><b>{escape(positions.name)}</b>{'; '.join(parts)}</figcaption></figure>"
