"""Convert answers and facts about a bundle to HTML, by the macros of ``parts.html``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from gmmvit_deploy.bundle.variants import onnx_file
from gmmvit_deploy.images.spec import image_from_pixels
from gmmvit_deploy.precision import PRECISIONS
from gmmvit_deploy.reports.pages import macro
from gmmvit_deploy.reports.pictures.attention_report import distances_image, rollout_image
from gmmvit_deploy.reports.pictures.drawings import Drawing, drawing_parts, step_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gmmvit_deploy.bench.waterfall import Step
    from gmmvit_deploy.bundle.artifacts import Bundle
    from gmmvit_deploy.page.trial import Answer
    from gmmvit_deploy.reports.pictures.drawings import Drawings

__all__ = [
    "agreement_html",
    "attention_html",
    "bundle_card",
    "drawn_parts",
    "message_html",
    "parity_html",
    "part",
    "seen_html",
    "shown_picture",
    "steps_html",
]

_LARGEST = "_largest_abs"  # the suffix of the entry of each program in a manifest's export_parity
_SHOWN_SIDE = 280  # in pixels; images with shorter sides are enlarged by an integer factor

part = partial(macro, "page/parts.html")
"""Return the HTML of a part of the page: ``part(name of the macro, arguments…)``."""


def message_html(text: str, *, kind: str = "note") -> str:
    """Return a paragraph.  kind: ``note``, ``quiet`` or ``error``."""
    return part("message", text, kind)


# Answers


def agreement_html(answer: Answer, *, url: str | None) -> str:
    """Return sentences and a table that state for each program whether the program agrees with PyTorch on an image.

    url: the address of the server; None without a server.
    """
    rows = [
        (
            agreement.program,
            agreement.verdict,
            "not a number" if math.isnan(agreement.distance) else f"{agreement.distance:.2g}",
            f"{agreement.limit:.2g}",
            ("yes" if agreement.agrees else "NO") + (", another class within rounding" if agreement.close else ""),
        )
        for agreement in answer.agreements
    ]
    return part("agreement", answer, url, rows)


def seen_html(answer: Answer) -> str:
    """Return the picture after preprocessing, enlarged by an integer factor.  The alternative text states the size."""
    height, width, channels = answer.pixels.shape
    alt = f"The image as the network sees it: {width}×{height} pixels, {channels} channels"
    return part("image", shown_picture(answer.pixels), alt, "picture")


def shown_picture(pixels: NDArray[Any]) -> Image.Image:
    """Convert uint8 (height, width, channels) to a picture, enlarged by an integer factor if it is small."""
    picture = image_from_pixels(pixels)
    factor = max(1, _SHOWN_SIDE // max(picture.size))
    enlarged: Image.Image = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    return enlarged


def attention_html(answer: Answer) -> str:
    """Return the picture of the rollout, or the reason why there is no rollout, and the picture of the distances."""
    attention = answer.attention
    rollout = None if attention.rollout is None else rollout_image(answer.pixels, attention.rollout)
    distances = distances_image(attention.distances) if attention.distances else None
    return part("attention", attention, rollout, distances)


class _StepRow(NamedTuple):
    """share: of the longest step.  segments: the shares of the step's parts.  parts: the parts in words."""

    name: str
    ms: float
    share: float
    segments: list[float]
    parts: str


def steps_html(steps: tuple[Step, ...]) -> str:
    """Return a table with a row for each step: the time, the time as a bar, and the parts of a server's time."""
    longest = max(step.ms for step in steps) or 1.0
    rows = []
    for step in steps:
        # The sum of the parts is a mean time, but the bar shows a median time, so the parts are scaled to fill the bar.
        times = list(step.parts.values()) or [step.ms]
        segments = [ms / (sum(times) or 1.0) for ms in times]
        rows.append(_StepRow(step.name, step.ms, step.ms / longest, segments, "; ".join(_by_model(step))))
    return part("steps", rows)


def _by_model(step: Step) -> Iterator[str]:
    """Yield the parts of a server's time of each model, such as ``gmmvit_network: queue 0.02, infer 1.41``.

    The parts are named by model and part. A part without a model, such as ``unexplained``, stands alone.
    """
    models: dict[str, list[str]] = {}
    for name, ms in step.parts.items():
        model, _, what = name.rpartition(" ")
        models.setdefault(model, []).append(f"{what} {ms:.2f}")
    for model, parts in models.items():
        yield f"{model}: {', '.join(parts)}" if model else parts[0]


def drawn_parts(drawings: Drawings) -> tuple[tuple[str, Callable[[], str]], ...]:
    """Return (title, content) of each part of the drawings, parts with pictures first.

    content: a function that draws the part as HTML, at its first call; further calls return the same text.
    """

    def drawn(draw: Callable[[], Drawing]) -> str:
        return macro("reports/templates/drawings.html", "drawing", draw())

    rows, omitted = step_rows(drawings.steps.values), drawings.steps.omitted
    parts: list[tuple[str, Callable[[], str]]] = [
        (title, cache(partial(drawn, draw))) for title, draw in drawing_parts(drawings)
    ]
    if rows or omitted:
        numbers = partial(macro, "reports/templates/drawings.html", "steps_in_numbers", rows, omitted)
        parts.append(("Steps with a number for each head", numbers))
    return tuple(parts)


# Facts about the bundle


def parity_html(numbers: Mapping[str, float], skipped: Mapping[str, str]) -> str:
    """Return the parity at export as a sentence, and the differences in a table that the visitor can unfold.

    numbers, skipped: ``export_parity`` and ``export_skipped`` of a bundle's manifest.
    """
    limit = numbers.get("limit", math.nan)
    differences = {key.removesuffix(_LARGEST): value for key, value in numbers.items() if key.endswith(_LARGEST)}
    passed = bool(differences) and all(largest <= limit for largest in differences.values())
    sentence = "Parity at export: not checked. The manifest records no comparison with PyTorch."
    if differences:
        program, largest = max(differences.items(), key=lambda item: item[1])
        sentence = (
            f"Parity at export: {'passed' if passed else 'FAILED'}. The logits of {len(differences)} programs were "
            f"compared with PyTorch; the largest difference is {largest:.2g} ({program}), and the limit is {limit:.2g}."
        )
    if numbers.get("spread", math.inf) <= limit:
        passed = False
        sentence = "Parity at export: nothing was proven, because PyTorch's logits are equal for all inputs."
    rows = [
        (name, f"{largest:.2g}", f"{limit:.2g}", "yes" if largest <= limit else "NO")
        for name, largest in differences.items()
    ]
    return message_html(sentence, kind="note" if passed else "error") + part("export_parity", rows, skipped)


def bundle_card(bundle: Bundle) -> dict[str, str]:
    """Return name → value of a bundle's hash, model, input, classes, masks, precisions and versions."""
    manifest, image = bundle.manifest, bundle.manifest.image
    sizes = {name: value for name, value in asdict(manifest.spec).items() if name not in ("family", "mask")}
    normalisation = ""
    if image.normalisation is not None:
        mean, std = (", ".join(f"{value:g}" for value in values) for values in image.normalisation)
        normalisation = f"; mean {mean}; std {std}"
    rows = {
        "bundle": str(bundle.path),
        "SHA-256": bundle.sha256,
        "checkpoint": ", ".join(f"{name} {value}" for name, value in manifest.checkpoint.items()),
        "model": f"{manifest.spec.family}, {manifest.spec.mask} mask",
        "sizes": ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in sizes.items()),
        "trainable parameters": f"{manifest.trainable_parameters:,}",
        "image": f"{image.height}×{image.width}, {image.mode}, resized by {image.resize_text}{normalisation}",
        "input": f"{manifest.input_kind}: {bundle.input_dtype} (1..{manifest.max_batch}, "
        f"{', '.join(map(str, bundle.input_shape))})",
        "classes": f"{manifest.spec.classes}",
        "masks": f"{len(manifest.masks)}, each folded into a constant",
        "precisions": ", ".join(name for name in PRECISIONS if (bundle.path / onnx_file(name)).is_file()),
        "made with": ", ".join(f"{name} {value}" for name, value in manifest.versions.items()),
    }
    return {name: value for name, value in rows.items() if value}
