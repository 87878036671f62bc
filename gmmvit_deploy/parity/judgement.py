"""Decide from the checks of parity whether ``gmmvit optimize`` may choose a program, and what its accuracy is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gmmvit_deploy.bundle.gates import Gate, kept_beside
from gmmvit_deploy.intervals import Measured, share_interval
from gmmvit_deploy.parity._accuracy import accuracy_of, lower_ratio
from gmmvit_deploy.parity.inputs import ImageStream
from gmmvit_deploy.parity.reference import Reference
from gmmvit_deploy.parity.report import RunnerReport

ENOUGH_IMAGES = 500
"""From this number of images on, the measured share decides; on fewer, its whole interval must reach the gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the images say about a program.

    judged: the share that the gate judges; each end of its interval is a one-sided 95 % bound, of a ratio with
    PyTorch's accuracy as measured.  images: their number.
    accuracy: the top-1, or the share of the images with all labels right; None for the gate ``kept decisions``.
    kept: the share of the decisions that are kept, which is also judged (`kept_beside`); None for that gate.
    images_to_settle, lacks_images: as in `Candidate`.  why_not: why the program may not be chosen; "" if it may.
    """

    judged: Measured | None = None
    images: int = 0
    accuracy: float | None = None
    kept: Measured | None = None
    images_to_settle: int | None = None
    lacks_images: bool = False
    why_not: str = ""


def judgement_of(report: RunnerReport, gate: Gate) -> Judgement:
    """Judge a program by its checks and by the gate.

    Beside an accuracy, decisions must be kept too. No other check may fail. A program whose decisions cannot differ is
    judged by its checks alone: float32, whose logits they hold to the noise of PyTorch's, and another precision within
    its limit if no image is near enough to a border.
    """
    if report.runner.precision == "fp32":
        return Judgement(why_not="; ".join(failed_checks(report)))
    numbers, judging = _decisions(report), report.check("decisions")
    wrong_labels = ""
    if gate.keep_neighbours is not None:
        numbers, judging = _neighbours(report), report.check("neighbours")
    elif gate.accuracy is not None:
        numbers, judging = replace(_accuracy(report), kept=numbers.judged), report.check("accuracy")
        wrong_labels = judging.details.get("wrong_labels", "")
    why = [judging.summary] if numbers.judged is None else []
    too_few: list[str] = []
    if numbers.judged is not None and not report.check("decisions").details.get("by_margins"):
        missed, too_few = _shortfalls(numbers.judged, numbers.kept, numbers.images, gate)
        why = [wrong_labels, *missed]
    why = [*filter(None, why), *failed_checks(report)]
    return replace(numbers, lacks_images=bool(too_few and not why), why_not="; ".join([*why, *too_few]))


def accuracy_of_pytorch(stream: ImageStream, reference: Reference) -> tuple[float | None, str]:
    """Return (PyTorch's accuracy, as `Judgement.accuracy`; why the labels cannot judge a program's, or "")."""
    accuracy = accuracy_of(stream.bundle, stream.images)
    if accuracy is None:
        return None, ""
    for batch in stream:
        trained = reference.answers(batch.inputs, exact=False)["logits"]
        accuracy.add(batch.labels, trained, trained)
    details = accuracy.check(1).details
    pairs = _pairs(details)
    return pairs and pairs["pytorch"], details.get("wrong_labels", "")


def failed_checks(report: RunnerReport) -> list[str]:
    """Return ``NAME: reason`` of failed checks, but for shares that parity holds to gates of its own."""
    return [
        f"{check.name}: {reason}"
        for check in report.checks
        if check.verdict == "failed" and check.name != "accuracy" and "interval" not in check.details
        for reason in check.reasons
    ]


def _shortfalls(judged: Measured, kept: Measured | None, images: int, gate: Gate) -> tuple[list[str], list[str]]:
    """Return (which shares of `Judgement` are below a gate, which reach it, but on too few images to tell)."""
    shares = [(judged, gate.kind, gate.min_share)]
    if gate.accuracy is not None and kept is not None:
        shares.append((kept, "kept decisions", kept_beside(gate.accuracy)))
    missed: list[str] = []
    too_few: list[str] = []
    for share, kind, least in shares:
        if share.value < least:
            missed.append(f"{kind} {share.value:.4f}, below the gate {least:g}")
        elif images < ENOUGH_IMAGES and share.low < least:
            too_few.append(
                f"{kind} {share.value:.4f} ({share.low:.4f} to {share.high:.4f}): on fewer than {ENOUGH_IMAGES} "
                f"images, the whole interval must reach the gate {least:g}"
            )
    return missed, too_few


def _accuracy(report: RunnerReport) -> Judgement:
    """Return the ratio of top-1, or of top-5 if that is lower; for several labels, of the images with all right."""
    details: Mapping[str, Any] = report.check("accuracy").details
    pairs = _pairs(details)
    if not pairs or not pairs["pytorch"]:
        return Judgement()
    ratio, lower = lower_ratio(details)
    whole, (low, high) = lower["pytorch"], lower["interval"]
    return Judgement(
        judged=Measured(value=ratio, low=1 + low / whole, high=1 + high / whole),
        images=details["images"],
        accuracy=pairs["runner"],
        images_to_settle=details.get("images_needed"),
    )


def _pairs(details: Mapping[str, Any]) -> Any:
    return details.get("top1") or details.get("all_right")


def _neighbours(report: RunnerReport) -> Judgement:
    details: Mapping[str, Any] = report.check("neighbours").details
    if not details:
        return Judgement()
    low, high = details["interval"]
    return Judgement(
        judged=Measured(value=details["kept"], low=low, high=high),
        images=details["images"],
    )


def _decisions(report: RunnerReport) -> Judgement:
    details: Mapping[str, Any] = report.check("decisions").details
    count = details.get("inputs", 0)
    if not count:
        return Judgement()
    low, high = share_interval(round(details["agreement"] * count), count)
    return Judgement(
        judged=Measured(value=details["agreement"], low=low, high=high),
        images=count,
        images_to_settle=details.get("images_needed"),
    )
