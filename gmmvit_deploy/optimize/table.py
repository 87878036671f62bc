"""The candidates of a choice as a table, for the terminal and the page."""

from __future__ import annotations

import shlex
from pathlib import Path

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.cascades import read_cascade
from gmmvit_deploy.bundle.choices import Candidate, Choice
from gmmvit_deploy.intervals import Measured
from gmmvit_deploy.parity.judgement import ENOUGH_IMAGES


def head_of(choice: Choice) -> tuple[str, ...]:
    """Return the names of the columns of `passed_rows`, which `left_out_rows` continues."""
    kind = choice.gate.kind if choice.gate is not None else "judged"
    kept = ("kept decisions",) if _by_accuracy(choice) else ()
    return ("runner", f"speed, {choice.base} = 1", "a batch", "accuracy", kind, *kept)


def passed_rows(choice: Choice) -> list[tuple[str, ...]]:
    """Return a row for each candidate that passed, best first."""
    return [_row(candidate, choice) for candidate in choice.passed]


def left_out_rows(choice: Choice) -> list[tuple[str, ...]]:
    """Return a row for each candidate that was measured or judged, and left out, with the reason."""
    return [
        (*_row(candidate, choice), candidate.reason)
        for candidate in choice.candidates
        if not candidate.passed and (candidate.speed or candidate.judged)
    ]


def reasons_of(choice: Choice) -> list[tuple[str, str]]:
    """Return (candidates, why they could not be tried), a row for each reason."""
    shared: dict[str, list[str]] = {}
    for candidate in choice.candidates:
        if not (candidate.passed or candidate.speed or candidate.judged):
            shared.setdefault(candidate.reason, []).append(str(candidate.runner))
    return [(", ".join(names), reason) for reason, names in shared.items()]


def cascades_of(choice: Choice, bundle: Bundle) -> list[str]:
    """Return two sentences about each cascade that was timed: about its time, and about its threshold."""
    sentences = []
    for one in choice.candidates:
        if (on := one.on_images) is not None:
            record = read_cascade(bundle, one.runner, one.graph_sha256)
            p99 = "" if on.p99 is None else f", 99 % within {on.p99 * 1e3:.1f} ms"
            sentences.append(
                f"{one.runner}: float32 computed {on.deferred:.1%} of the images again; a batch takes "
                f"{on.mean * 1e3:.1f} ms on average, half within {on.p50 * 1e3:.1f} ms{p99}. The threshold: {record}"
            )
    return sentences


def could_pass(choice: Choice, bundle: Path) -> str:
    """Return which faster candidates only lack images, with the command that judges them on enough, or ""."""
    gate, images = choice.gate, choice.images
    if gate is None or images is None:
        return ""
    lacking = [
        f"{one.runner}, {one.speed.value:.2f} times as fast as {choice.base}"
        for one in choice.candidates
        if one.speed is not None and one.speed.low > 1 and one.lacks_images
    ]
    words = ["gmmvit", "optimize", str(bundle), "--data", images.source]
    words += ["--keep-decisions" if gate.keep_decisions else "--gate", f"{gate.min_share:g}"]
    words += ["--for", choice.goal, "--batch", str(choice.batch)] if choice.batch > 1 else []
    if not lacking:
        return ""
    return (
        f"with {ENOUGH_IMAGES} images in place of {images.count}, these could pass: {'; '.join(lacking)}. Add images "
        f"to the data, and type {shlex.join(words)}"
    )


def _row(candidate: Candidate, choice: Choice) -> tuple[str, ...]:
    accuracy, judged = candidate.accuracy, _measured(candidate.judged, ".4f")
    if candidate.passed and candidate.runner.precision == "fp32" and choice.images is not None:
        accuracy, judged = choice.images.accuracy, "as PyTorch"  # no gate judges float32
    return (
        str(candidate.runner),
        _measured(candidate.speed, ".2f"),
        "" if candidate.seconds is None else f"{candidate.seconds * 1e3:.1f} ms",
        "" if accuracy is None else f"{accuracy:.2%}",
        judged,
        *((_measured(candidate.kept, ".4f"),) if _by_accuracy(choice) else ()),
    )


def _by_accuracy(choice: Choice) -> bool:
    return choice.gate is not None and choice.gate.accuracy is not None


def _measured(measured: Measured | None, form: str) -> str:
    if measured is None:
        return ""
    return f"{measured.value:{form}} ({measured.low:{form}} to {measured.high:{form}})"
