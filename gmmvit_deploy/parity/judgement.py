"""Decide from the checks of parity whether ``gmmvit optimize`` may choose a program, and what its accuracy is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gmmvit_deploy.bundle.choices import Gate, GateKind, Measured
from gmmvit_deploy.export.gates import kept_beside
from gmmvit_deploy.intervals import share_interval
from gmmvit_deploy.parity._accuracy import accuracy_of, lower_ratio
from gmmvit_deploy.parity.inputs import ImageStream
from gmmvit_deploy.parity.report import RunnerReport
from gmmvit_deploy.precision import SPECS
from gmmvit_deploy.runtimes.runners.eager import EagerRunner

LEAST: Mapping[GateKind, float] = {
    "accuracy ratio": SPECS["int8"].accuracy_gate,
    "kept decisions": SPECS["int8"].kept_gate,
}
"""Kind of a gate → the share that a program of any precision must reach, unless the user types another."""
LEAST_IMAGES = 500
"""From this number of images on, the measured share decides; on fewer, its whole interval must reach the gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the images say about a program.

    judged: the share that the gate judges; each end of its interval is a one-sided 95 % bound, of a ratio with
    PyTorch's accuracy as measured.  images: their number.
    accuracy: the top-1, or the share of the images with all labels right; None for the gate ``kept decisions``.
    kept: the share of the decisions that are kept, which is also judged (`kept_beside`); None for that gate.
    images_to_settle: as in `Candidate`.  why_not: why the program may not be chosen; "" if it may.
    """

    judged: Measured | None = None
    images: int = 0
    accuracy: float | None = None
    kept: Measured | None = None
    images_to_settle: int | None = None
    why_not: str = ""


def judgement_of(report: RunnerReport, gate: Gate) -> Judgement:
    """Judge a program by its checks and by the gate.

    Of accuracy and decisions, the gate's kind decides, by the gate; beside an accuracy, decisions must be kept too. No
    other check may fail. A float32 program is judged by its checks alone, which hold its logits to the noise of
    PyTorch's.
    """
    numbers = decisions = _decisions(report)
    below = [_below(decisions, gate)]
    if gate.kind == "accuracy ratio":
        numbers = replace(_accuracy(report), kept=decisions.judged)
        beside = Gate(kind="kept decisions", least=kept_beside(gate.least))
        below = [
            str(report.check("accuracy").details.get("wrong_labels", "")),
            _below(numbers, gate),
            _below(decisions, beside),
        ]
    if report.precision == "fp32":
        below = []
    if numbers.judged is None:
        below = [report.check("accuracy" if gate.kind == "accuracy ratio" else "decisions").summary]
    return replace(numbers, why_not="; ".join(filter(None, below)) or "; ".join(failed_checks(report)))


def wrong_labels_in(stream: ImageStream) -> str:
    """Return why the labels of images cannot judge an accuracy, by the answers of PyTorch alone, or ""."""
    accuracy = accuracy_of(stream.bundle, stream.images)
    if accuracy is None:
        return ""
    with EagerRunner(stream.bundle) as pytorch:
        for batch in stream:
            logits = pytorch.run(batch.inputs)
            accuracy.add(batch.labels, logits, logits)
    return str(accuracy.check(1).details.get("wrong_labels", ""))


def failed_checks(report: RunnerReport) -> list[str]:
    """Return ``NAME: reason`` for each failed check, but for shares that parity holds to gates of its own."""
    return [
        f"{check.name}: {reason}"
        for check in report.checks
        if check.verdict == "failed" and check.name != "accuracy" and "interval" not in check.details
        for reason in check.reasons
    ]


def _below(numbers: Judgement, gate: Gate) -> str:
    """Return why a program does not reach the gate, or ""."""
    judged = numbers.judged
    if judged is None:
        return ""
    if judged.value < gate.least:
        return f"{gate.kind} {judged.value:.4f}, below the gate {gate.least:g}"
    if numbers.images < LEAST_IMAGES and judged.low < gate.least:
        return (
            f"{gate.kind} {judged.value:.4f} ({judged.low:.4f} to {judged.high:.4f}): on fewer than {LEAST_IMAGES} "
            f"images, the whole interval must reach the gate {gate.least:g}"
        )
    return ""


def _accuracy(report: RunnerReport) -> Judgement:
    """Return the ratio of top-1, or of top-5 if that is lower; for several labels, of the images with all right."""
    details: Mapping[str, Any] = report.check("accuracy").details
    pairs = details.get("top1") or details.get("all_right")
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
