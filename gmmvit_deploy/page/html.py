"""Convert answers and facts to HTML.  All text is escaped, and pictures are embedded in the HTML."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from html import escape
from typing import TYPE_CHECKING, Any

from PIL import Image

from gmmvit_deploy.images.spec import image_from_pixels
from gmmvit_deploy.reports.pages import scrollable
from gmmvit_deploy.reports.pictures.attention_images import distances_image, rollout_image
from gmmvit_deploy.reports.pictures.drawing_report import drawing_parts, steps_in_numbers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gmmvit_deploy.bench.waterfall import Step
    from gmmvit_deploy.images.labels import Prediction
    from gmmvit_deploy.page.facts import ExportParity
    from gmmvit_deploy.page.trial import Agreement, Answer
    from gmmvit_deploy.reports.pictures.drawings import Drawings

__all__ = [
    "agreement_html",
    "attention_html",
    "drawn_parts",
    "facts_html",
    "message_html",
    "parity_html",
    "picture_html",
    "predictions_html",
    "seen_html",
    "steps_html",
    "thumbnail",
]

_SHOWN_SIDE = 280  # in pixels; images with shorter sides are enlarged by an integer factor


def message_html(text: str, *, kind: str = "note") -> str:
    """Return a paragraph.  kind: ``note`` or ``error``; an error has a colour and begins with the word Error."""
    label = "<b>Error:</b> " if kind == "error" else ""
    return f'<p class="{kind}">{label}{escape(text)}</p>'


def predictions_html(answer: Answer) -> str:
    """Return a table with a row for each class: label, probability, and the probability as a bar."""
    rows = "".join(
        f'<tr><th scope="row">{escape(p.label)}</th><td>{p.probability:.1%}{_threshold(p)}</td>'
        f'<td class="track"><div class="bar" style="width:{100 * p.probability:.2f}%"></div></td></tr>'
        for p in answer.predictions
    )
    head = '<tr><th scope="col">label</th><th scope="col">probability</th><td></td></tr>'
    return (
        f'<p class="verdict">{escape(answer.verdict)}</p>'
        f'<table class="predictions"><caption>The {len(answer.predictions)} likeliest classes</caption>'
        f"<thead>{head}</thead><tbody>{rows}</tbody></table>"
    )


def _threshold(prediction: Prediction) -> str:
    """Return the threshold of a label, and whether the probability reaches it; empty for a single-label network."""
    if prediction.threshold is None:
        return ""
    return f" ({'at least' if prediction.present else 'below'} {prediction.threshold:.1%})"


def agreement_html(answer: Answer, *, url: str | None) -> str:
    """Return sentences and a table that state for each program whether the program agrees with PyTorch on an image.

    url: the address of the server; None without a server.
    """
    sentences = []
    if url is not None:
        sentences.append(_server_sentence(answer, url))
    if answer.other_bundle:
        sentences.append(message_html(answer.other_bundle, kind="error"))
    rows = "".join(_agreement_row(agreement) for agreement in answer.agreements)
    names = ("program", "predicted class", "distance from PyTorch", "limit", "agrees")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    derivations = "".join(
        f"<li>{escape(agreement.program)}: {agreement.limit:.2g} = {escape(agreement.derivation)}</li>"
        for agreement in answer.agreements
    )
    distances = (
        "<table><caption>Largest distance of the logits from float64 PyTorch</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    )
    return (
        f"{''.join(sentences)}{scrollable('Distances', distances)}"
        f"<details><summary>Where the limits come from</summary><ul>{derivations}</ul></details>"
    )


def _server_sentence(answer: Answer, url: str) -> str:
    if answer.server_error:
        return message_html(f"no answer from the server at {url}: {answer.server_error}", kind="error")
    local, *served = answer.agreements
    if all(agreement.agrees for agreement in served) and local.agrees:
        return message_html(f"The server at {url} agrees: both answers match PyTorch within the parity limit.")
    odd = ", ".join(agreement.program for agreement in answer.agreements if not agreement.agrees)
    return message_html(f"the answers do not agree; the logits of {odd} are outside the parity limit", kind="error")


def _agreement_row(agreement: Agreement) -> str:
    words = "yes" if agreement.agrees else "NO"
    if agreement.close:
        words += ", another class within rounding"
    shown = "not a number" if math.isnan(agreement.distance) else f"{agreement.distance:.2g}"
    return (
        f'<tr><th scope="row">{escape(agreement.program)}</th><td>{escape(agreement.verdict)}</td>'
        f"<td>{shown}</td><td>{agreement.limit:.2g}</td><td>{words}</td></tr>"
    )


def seen_html(answer: Answer) -> str:
    """Return the picture after preprocessing, enlarged by an integer factor.  The alternative text states the size."""
    height, width, channels = answer.pixels.shape
    alt = f"The image as the network sees it: {width}×{height} pixels, {channels} channels"
    return picture_html(shown_picture(answer.pixels), alt)


def attention_html(answer: Answer) -> str:
    """Return the picture of the rollout, or the reason why there is no rollout, and the picture of the distances."""
    attention = answer.attention
    if attention.rollout is None:
        rollout = message_html(f"No rollout: {attention.no_rollout}.")
    else:
        reads, prefix = attention.rollout.reads, attention.rollout.prefix_share
        rollout = picture_html(
            rollout_image(answer.pixels, attention.rollout),
            "The image, the attention rollout over the image, and the rollout with a colour scale",
        ) + message_html(
            f"The share of each patch in the tokens that the classifier reads ({reads}). "
            f"The share of the prefix tokens is {prefix:.1%}."
        )
    if not attention.distances:
        return rollout
    names = ", ".join(f"{number} {layer.layer}" for number, layer in enumerate(attention.distances, start=1))
    distances = picture_html(distances_image(attention.distances), "Mean attention distance of each head by layer")
    return f"{rollout}{distances}{message_html(f'Layers: {names}.')}"


def drawn_parts(drawings: Drawings) -> tuple[tuple[str, Callable[[], str]], ...]:
    """Return (title, content) of each part of the drawings, parts with pictures first.

    content: a function that draws the part as HTML, at its first call; further calls return the same text.
    """
    numbers = steps_in_numbers(drawings.steps)
    parts = list(drawing_parts(drawings))
    if numbers:
        parts.append(("Steps with a number for each head", partial(str, numbers)))
    return tuple((title, cache(content)) for title, content in parts)


def shown_picture(pixels: NDArray[Any]) -> Image.Image:
    """Convert uint8 (height, width, channels) to a picture, enlarged by an integer factor if it is small."""
    picture = image_from_pixels(pixels)
    factor = max(1, _SHOWN_SIDE // max(picture.size))
    enlarged: Image.Image = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    return enlarged


def steps_html(steps: tuple[Step, ...]) -> str:
    """Return a table with a row for each step: the time, the time as a bar, and the parts of a server's time."""
    longest = max(step.ms for step in steps) or 1.0
    rows = "".join(_step_row(step, longest) for step in steps)
    head = (
        '<th scope="col">step</th><th scope="col">ms</th><td></td>'
        '<th scope="col" class="parts">parts of the server\'s time, ms</th>'
    )
    return scrollable(
        "Times",
        '<table class="steps"><caption>Median time of up to 5 repeats with this image</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>",
    )


def _step_row(step: Step, longest: float) -> str:
    # The sum of the parts is a mean time, but the bar shows a median time, so the parts are scaled to fill the bar.
    parts = step.parts or {"": step.ms}
    total = sum(parts.values()) or 1.0
    segments = "".join(
        f'<div class="bar part{number % 2}" style="width:{100 * ms / total:.2f}%"></div>'
        for number, ms in enumerate(parts.values())
    )
    words = "; ".join(f"{model}: {', '.join(parts)}" if model else parts[0] for model, parts in _by_model(step.parts))
    return (
        f'<tr><th scope="row">{escape(step.name)}</th><td>{step.ms:.2f}</td>'
        f'<td class="track"><div class="bars" style="width:{100 * step.ms / longest:.2f}%">{segments}</div></td>'
        f'<td class="parts">{escape(words)}</td></tr>'
    )


def _by_model(parts: Mapping[str, float]) -> list[tuple[str, list[str]]]:
    """Group the parts of a server's time by model.

    For example, the part ``gmmvit_network infer`` of 1.41 ms is listed as ``infer 1.41`` under ``gmmvit_network``.
    A part without a model, such as ``unexplained``, is listed under an empty name.
    """
    models: dict[str, list[str]] = {}
    for name, ms in parts.items():
        model, _, part = name.rpartition(" ")
        models.setdefault(model, []).append(f"{part} {ms:.2f}")
    return list(models.items())


def parity_html(parity: ExportParity) -> str:
    """Return the verdict as a sentence, and the differences in a table that the visitor can unfold."""
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{largest:.2g}</td><td>{parity.limit:.2g}</td>'
        f"<td>{'yes' if largest <= parity.limit else 'NO'}</td></tr>"
        for name, largest in parity.differences.items()
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("program", "largest difference", "limit", "within"))
    skipped = "".join(f"<li>{escape(name)}: {escape(reason)}</li>" for name, reason in parity.skipped.items())
    programs = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    not_compared = f"<p>Not compared:</p><ul>{skipped}</ul>" if skipped else ""
    return (
        f"{message_html(parity.sentence(), kind='note' if parity.passed else 'error')}"
        f"<details><summary>Programs compared at export</summary>{scrollable('Programs compared at export', programs)}"
        f"{not_compared}</details>"
    )


def facts_html(rows: Mapping[str, str]) -> str:
    """Return names and values as a description list."""
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in rows.items()) + "</dl>"


def picture_html(picture: Image.Image, alt: str) -> str:
    return f'<img class="picture" alt="{escape(alt)}" src="{_data_url(picture)}">'


def thumbnail(pixels: NDArray[Any], alt: str) -> str:
    """Return a small picture of an example image, for the button that selects the example."""
    return f'<img class="thumbnail" alt="{escape(alt)}" src="{_data_url(image_from_pixels(pixels))}">'


def _data_url(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
