"""Write a page about an image and a model.

    answer       the likeliest labels
    rollout      the image; the image in grey, covered with the shares of the patches; the shares alone
    masks        the image in grey, covered with the mask row of the token in the middle, for each layer and head
    distances    a point for each head: the layer from left to right, the mean attention distance from bottom to top

White is a share of 0, and full blue is the largest share of a patch. The page also shows the other steps on the
attention scores and the embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from gmmvit_deploy.images.spec import image_from_pixels
from gmmvit_deploy.models.families import family_of
from gmmvit_deploy.reports.pages import Figure, Summary, rendered
from gmmvit_deploy.reports.pictures.attention_of_image import HeadDistances, ImageAttention, ImageRollout
from gmmvit_deploy.reports.pictures.drawings import drawings_of, page_values
from gmmvit_deploy.reports.pictures.mask_images import coloured, overlay_image, token_map
from gmmvit_deploy.reports.pictures.mask_numbers import masks_of

if TYPE_CHECKING:
    from gmmvit_deploy.models.layers.model import Model

_PANELS = ("The image", "Rollout over the image", "Rollout of each patch")
_PANEL, _MARGIN, _LINE, _FONT = 256, 12, 20, 14  # sizes in pixels; _PANEL is the smallest longer side of a panel
_STRONGEST = 0.8  # the opacity of the largest share; the image stays visible
_PLOT_HEIGHT, _PLOT_LEFT, _LAYER_WIDTH, _DOT = 240, 48, 28, 4
_TICKS = 4
_MASK_SIDE = 192  # the smallest longer side of a mask over the image


def rollout_panels(pixels: NDArray[Any], rollout: ImageRollout) -> tuple[Image.Image, Image.Image, Image.Image]:
    """Return the image (uint8 pixels), the rollout over it, and the rollout, enlarged by an integer factor."""
    picture = image_from_pixels(pixels).convert("RGB")
    factor = -(-_PANEL // max(picture.size))
    size = (picture.width * factor, picture.height * factor)
    largest = float(rollout.values.max())
    shares = rollout.values / largest if largest > 0 else rollout.values
    enlarged = picture.resize(size, Image.Resampling.NEAREST)
    colours = Image.fromarray(coloured(shares, 1.0)).resize(size, Image.Resampling.NEAREST)
    full = Image.fromarray(coloured(np.ones_like(shares), 1.0)).resize(size, Image.Resampling.NEAREST)
    opacity = Image.fromarray((255 * _STRONGEST * shares).round().astype(np.uint8))
    over = enlarged.convert("L").convert("RGB")
    over.paste(full, mask=opacity.resize(size, Image.Resampling.NEAREST))
    return enlarged, over, colours


def distances_image(layers: tuple[HeadDistances, ...]) -> Image.Image:
    """Draw the mean attention distance of each head in pixels.  Heads without a distance have no point."""
    values = [[value for value in layer.pixels if value is not None] for layer in layers]
    step = _nice_step(max((max(row, default=0.0) for row in values), default=0.0) / _TICKS)
    end = step * _TICKS
    width = _PLOT_LEFT + max(len(layers) * _LAYER_WIDTH, 320) + _MARGIN
    canvas = Image.new("RGB", (width, _PLOT_HEIGHT + 3 * _LINE + _MARGIN), "white")
    draw = ImageDraw.Draw(canvas)
    draw.text((_MARGIN, 4), "Mean attention distance of each head, in pixels", fill="black", font_size=_FONT)
    top = 2 * _LINE
    for tick in range(_TICKS + 1):
        height = top + _PLOT_HEIGHT * (1 - tick / _TICKS)
        draw.line((_PLOT_LEFT, height, width - _MARGIN, height), fill="lightgrey")
        draw.text((_MARGIN // 2, height - 7), f"{tick * step:g}", fill="black", font_size=_FONT)
    for number, row in enumerate(values):
        middle = _PLOT_LEFT + _LAYER_WIDTH * (number + 0.5)
        draw.text((middle - 4, top + _PLOT_HEIGHT + 4), str(number + 1), fill="black", font_size=_FONT)
        for value in row:
            height = top + _PLOT_HEIGHT * (1 - value / end)
            draw.ellipse((middle - _DOT, height - _DOT, middle + _DOT, height + _DOT), outline=(8, 64, 129), width=2)
    return canvas


def _nice_step(smallest: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least ``smallest``; 1 for 0."""
    if smallest <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(smallest))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= smallest)


def _answer(attention: ImageAttention, image: str) -> str:
    if not attention.predictions:
        return f"The model has no classes; the image is {image}."
    best, *_ = attention.predictions
    present = [best] if best.threshold is None else [guess for guess in attention.predictions if guess.present]
    labels = ", ".join(f"{guess.label} ({guess.probability:.1%})" for guess in present)
    return f"The model classifies {image} as {labels or 'none of its labels'}."


def attention_page(model: Model, pixels: NDArray[Any], attention: ImageAttention, *, bundle: str, image: str) -> str:
    """Return the page as HTML, from the result of `attention_of_bundle`.  bundle, image: their names."""
    layers = attention.distances
    distances_figure = None
    if layers:
        alt = "Mean attention distance of each head by layer"
        caption = "A point is a head. The numbers below are the layers of the table."
        distances_figure = Figure("", (caption,), ((alt, distances_image(layers)),), layout="plot")
    heads = max((len(layer.pixels) for layer in layers), default=0)
    several = any(guess.threshold is not None for guess in attention.predictions)
    return rendered(
        "reports/templates/attention.html",
        title=f"{bundle}: answer and attention for {image}",
        summary=_summary(attention, image),
        answer_head=["label", "probability"] + ["threshold", "present"] * several,
        answer=[
            (
                guess.label,
                f"{guess.probability:.1%}",
                *(() if guess.threshold is None else (f"{guess.threshold:.1%}", "yes" if guess.present else "no")),
            )
            for guess in attention.predictions
        ],
        images=list(_image_figures(pixels, attention.rollout)),
        rollout=attention.rollout,
        masks=list(_mask_figures(model, pixels)),
        distances_figure=distances_figure,
        heads=[f"head {head}" for head in range(heads)],
        distances=[
            (
                str(number),
                layer.layer,
                f"{layer.grid[0]}×{layer.grid[1]}" + (f", {layer.sequences} sequences" if layer.sequences > 1 else ""),
                *(_cell(layer, head) for head in range(heads)),
            )
            for number, layer in enumerate(layers, start=1)
        ],
        **page_values(drawings_of(model)),
        not_drawn={
            **({"attention rollout": attention.no_rollout} if attention.no_rollout else {}),
            **{f"distance of {name}": reason for name, reason in attention.no_distances.items()},
        },
    )


def _image_figures(pixels: NDArray[Any], rollout: ImageRollout | None) -> Iterator[Figure]:
    height, width, channels = pixels.shape
    caption = f"as the network sees it: {width}×{height} pixels, {channels} channel{'s' * (channels > 1)}"
    panels = (image_from_pixels(pixels),) if rollout is None else rollout_panels(pixels, rollout)
    for title, panel in zip(_PANELS, panels, strict=False):  # without a rollout, only the image
        lines = (caption,) if title == _PANELS[0] else ()
        yield Figure(title, lines, ((title, panel),), layout="single", all_colours=True)


def _mask_figures(model: Model, pixels: NDArray[Any]) -> Iterator[Figure]:
    """Yield for each layer and head the mask row of the token in the middle of the grid, over the image."""
    picture, windows = image_from_pixels(pixels), family_of(model.spec).windows(model.spec)
    for layer in masks_of(model):
        within = windows.get(layer.layer)
        row, column = (side // 2 for side in (layer.grid if within is None else (within.grid, within.grid)))
        for head in range(len(layer.heads)):
            values = token_map(layer, head, row=row, column=column, windows=within)
            drawn = overlay_image(picture, layer, values, row=row, column=column, side=_MASK_SIDE)
            name = f"{layer.layer}, {f'head {head}' if len(layer.heads) > 1 else 'all heads'}"
            caption = f"token in row {row + 1}, column {column + 1}"
            yield Figure(name, (caption,), ((f"Mask of {name}, over the image", drawn),), layout="single")


def _summary(attention: ImageAttention, image: str) -> Summary:
    return Summary(
        outcome="passed" if attention.predictions else "skipped",
        word="CLASSIFIED" if attention.predictions else "NO CLASSES",
        sentence=_answer(attention, image),
        changes=(
            "Another image: the weights of attention depend on the image",
            "What the page cannot show: the rollout follows the weights of attention, not the values and the MLPs, so "
            "it does not prove why the model chose the class",
        ),
    )


def _cell(layer: HeadDistances, head: int) -> str:
    if head >= len(layer.pixels):
        return ""
    pixels, patches = layer.pixels[head], layer.patches[head]
    return "–" if pixels is None or patches is None else f"{pixels:.1f} ({patches:.2f})"
