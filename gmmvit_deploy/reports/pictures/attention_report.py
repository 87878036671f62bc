"""Write a report about the attention of a bundle's model for an image, as a page (.html) or as a picture (.png).

The page shows the rollout and the mean attention distances, and needs no other file.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.files.writing import new_file
from gmmvit_deploy.reports.pages import Summary, definitions, page, section, table
from gmmvit_deploy.reports.pictures.attention_images import attention_sheet, distances_image, rollout_image
from gmmvit_deploy.reports.pictures.attention_of_image import HeadDistances, ImageAttention, ImageRollout
from gmmvit_deploy.reports.pictures.inline import inline_image, png
from gmmvit_deploy.reports.pictures.mask_report import require_report_suffix

__all__ = ["attention_page", "write_attention_report"]

_STYLE = "figure img { max-width: 100%; image-rendering: pixelated; background: #ffffff; }"


def write_attention_report(
    pixels: NDArray[Any], attention: ImageAttention, path: Path, *, bundle: str, image: str, force: bool = False
) -> None:
    """Write the report to ``path``, as a page (.html) or a picture (.png).

    pixels, attention: the result of `attention_of_bundle`.  bundle, image: the names of the bundle and of the image.
    force: True to replace an existing file.
    Errors:
        InputError: ``path`` has another suffix, or a picture is requested but the model has neither a rollout nor
            distances.
        OutputError: the file exists and ``force`` is False, or the file cannot be written.
    """
    if require_report_suffix(path) == ".png":
        if attention.rollout is None and not attention.distances:
            raise InputError(
                f"{bundle}: the model has no attention to draw: {attention.no_rollout}",
                hint="type --report FILE.html for a page with the reason for each attention",
            )
        classified = f", classified as {attention.label}" if attention.label else ""
        lines = (f"{bundle}: attention for {image}{classified}", _line(attention))
        data = png(attention_sheet(pixels, attention.rollout, attention.distances, lines=lines))
    else:
        data = attention_page(pixels, attention, bundle=bundle, image=image).encode()
    with new_file(path, force=force) as file:
        file.write(data)


def _line(attention: ImageAttention) -> str:
    if attention.rollout is None:
        return f"no rollout: {attention.no_rollout}"
    return f"rollout of {attention.rollout.reads}; prefix tokens {attention.rollout.prefix_share:.1%}"


def attention_page(pixels: NDArray[Any], attention: ImageAttention, *, bundle: str, image: str) -> str:
    """Return the page as HTML.  The page contains all pictures.

    The arguments are those of `write_attention_report`.
    """
    return page(
        kind="Attention report: which tokens the model attends to, for an image",
        title=f"{bundle}: attention for {image}",
        summary=_summary(attention, image),
        sections=(
            section("Rollout", _rollout(pixels, attention.rollout, attention.no_rollout)),
            section("Mean attention distance", _distances(attention.distances)),
            section("Attentions without a distance", _without(attention)),
        ),
        style=_STYLE,
    )


def _summary(attention: ImageAttention, image: str) -> Summary:
    defined = attention.rollout is not None
    sentence = f"The model classifies {image} as {attention.label}." if attention.label else f"The image is {image}."
    if not defined:
        sentence += f" The rollout is not defined for this model: {attention.no_rollout}."
    return Summary(
        outcome="passed" if defined else "skipped",
        word="ROLLOUT DRAWN" if defined else "NO ROLLOUT",
        sentence=sentence,
        changes=(
            "Another image: the weights of attention depend on the image",
            "What the page cannot show: the rollout follows the weights of attention, not the values and the MLPs, so "
            "it does not prove why the model chose the class",
        ),
    )


def _rollout(pixels: NDArray[Any], rollout: ImageRollout | None, reason: str) -> str:
    if rollout is None:
        return f"<p>Not drawn: {escape(reason)}.</p>"
    alt = "the image, the rollout over the image, and the rollout with a colour scale"
    picture = inline_image(rollout_image(pixels, rollout), alt=alt, all_colours=True)
    return (
        f"<figure>{picture}<figcaption>The darker a patch, the larger its share. "
        "Blue is the largest share of a patch, white is 0.</figcaption></figure>"
        + definitions(
            {
                "tokens that the head reads": rollout.reads,
                "share of all patches": f"{rollout.values.sum():.2%}",
                "share of the prefix tokens": f"{rollout.prefix_share:.2%}",
            }
        )
    )


def _distances(layers: tuple[HeadDistances, ...]) -> str:
    if not layers:
        return "<p>The model has no attention between the tokens of a known grid.</p>"
    heads = max(len(layer.pixels) for layer in layers)
    rows = [
        (
            str(number),
            escape(layer.layer),
            f"{layer.grid[0]}×{layer.grid[1]}" + (f", {layer.sequences} sequences" if layer.sequences > 1 else ""),
            *(_cell(layer, head) for head in range(heads)),
        )
        for number, layer in enumerate(layers, start=1)
    ]
    picture = inline_image(distances_image(layers), alt="mean attention distance of each head by layer")
    return (
        f"<figure>{picture}<figcaption>A point is a head. The numbers below are the layers of the table.</figcaption>"
        "</figure>"
        + table(
            "Mean attention distance in pixels (in steps of the grid)",
            ("number", "layer", "grid", *(f"head {head}" for head in range(heads))),
            rows,
            row_head=1,
        )
    )


def _cell(layer: HeadDistances, head: int) -> str:
    if head >= len(layer.pixels):
        return ""
    pixels, patches = layer.pixels[head], layer.patches[head]
    return "–" if pixels is None or patches is None else f"{pixels:.1f} ({patches:.2f})"


def _without(attention: ImageAttention) -> str:
    if not attention.no_distances:
        return ""
    return definitions(dict(attention.no_distances))
