"""Check that an image's logits do not depend on the other images of its batch.

Each trial runs the same images in an ordinary batch and in another batch, and compares the logits:

    alone         row k runs without other images, in the smallest batch that the runner takes, filled with copies
    duplicates    the same image is in every row; every row must have the logits of this image
    permutations  the rows are in another order; the logits must be in the same other order
    neighbours    row k stays, and every other row is another image; the logits of row k must not change

The batch sizes are, for every optimisation profile, the three smallest, an odd size in the middle, and the largest.
Two runs of the same row may round differently, so the difference may be as large as the limit for the distance from
float64. Mixed-up rows are detected without a tolerance: a row is mixed up if its logits are far nearer to the
reference of another row than to the reference of its own image.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.parity.measures import distance
from gmmvit_deploy.parity.verdict import Check
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.runners.runner import Runner
from gmmvit_deploy.tolerances import Limit

__all__ = ["batch_sizes", "check_invariance", "mixed_up"]

_ROWS_ALONE = 4
_SEED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The logits of rows, compared between two batches.

    way: name of the trial in the module's head.  largest: largest absolute difference of a row's logits between both
    batches.  same_bits: True if the logits are equal bit for bit.
    """

    way: str
    batch: int
    largest: float
    same_bits: bool
    passed: bool


def batch_sizes(ranges: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """Return for each (smallest, largest) range: the three smallest sizes, an odd size in the middle, the largest."""
    sizes = set()
    for least, most in ranges:
        middle = (least + most) // 2
        odd = middle + 1 - middle % 2
        sizes |= {size for size in (least, least + 1, least + 2, odd, most) if least <= size <= most}
    return tuple(sorted(sizes))


def mixed_up(logits: NDArray[Any], expected: NDArray[Any]) -> list[tuple[int, int]]:
    """Return (row, other row) for every row whose logits are far nearer to the other row's reference than to its own.

    logits: (B, C) of the runner.  expected: (B, C) of the reference.  "Far nearer" is a factor of four in Euclidean
    distance, so that the rounding of a coarse precision is not mistaken for the logits of another row.
    """
    if logits.shape != expected.shape:
        return []
    logits, expected = np.asarray(logits, np.float64), np.asarray(expected, np.float64)
    distances = np.square(logits).sum(1)[:, None] + np.square(expected).sum(1)[None] - 2 * logits @ expected.T
    nearest = np.nan_to_num(distances, nan=np.inf).argmin(1)
    rows = np.arange(len(logits))
    to_own = np.square(logits - expected).sum(1)
    to_nearest = np.square(logits - expected[nearest]).sum(1)
    return [(int(row), int(nearest[row])) for row in rows[16 * to_nearest < to_own]]


def check_invariance(
    runner: Runner,
    inputs: NDArray[Any],
    exact: NDArray[Any],
    limit: Limit,
    *,
    on_progress: OnProgress = ignore,
) -> Check:
    """Batch the same images in the ways listed above and compare their logits.

    inputs: at least 2 distinct images (N, …).  exact: their float64 logits (N, C).
    Errors: every error that the runner raises.
    """
    sizes = batch_sizes(runner.ranges)
    trials: list[Trial] = []
    reasons: list[str] = []
    generator = np.random.default_rng(_SEED)
    for size in sizes:
        rows = np.resize(generator.permutation(len(inputs)), size)
        answers = runner.run(inputs[rows])
        if strays := mixed_up(answers, exact[rows]):
            row, other = strays[0]
            reasons.append(
                f"rows are mixed up at batch {size}: row {row} got the logits of row {other}; "
                f"mixed-up rows in this batch: {len(strays)}"
            )
        for way, logits, ordinary in _ways(runner, inputs, rows, answers, generator):
            trials.append(_trial(way, size, logits, ordinary, limit))
            on_progress(Progress(f"{way}, batch {size}"))
    failed = [trial for trial in trials if not trial.passed]
    reasons += [
        f"trial {trial.way!r} at batch {trial.batch}: a row's logits change by {trial.largest:.3g}; "
        f"expected at most {limit.largest:.3g}"
        for trial in failed
    ]
    worst = max((trial.largest for trial in trials), key=lambda value: np.inf if np.isnan(value) else value)
    same = sum(trial.same_bits for trial in trials)
    return Check(
        name="batch invariance",
        verdict="failed" if reasons else "passed",
        summary=f"batches of {', '.join(map(str, sizes))}: a row's logits change by at most {worst:.2g} "
        f"(limit {limit.largest:.2g}); bit for bit the same in {same} of {len(trials)} trials",
        reasons=tuple(reasons),
        details={"batches": list(sizes), "limit": limit.largest, "trials": [asdict(trial) for trial in trials]},
    )


def _ways(
    runner: Runner, inputs: NDArray[Any], rows: NDArray[Any], answers: NDArray[Any], generator: np.random.Generator
) -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
    """Yield (way, logits of this way, logits of the ordinary batch) for the same rows."""
    size = len(rows)
    smallest = min(least for least, _ in runner.ranges)
    watched = generator.permutation(size)[:_ROWS_ALONE]
    if size > smallest:
        alone = [runner.run(inputs[np.resize(rows[row], smallest)])[:1] for row in watched]
        yield "alone", np.concatenate(alone), answers[watched]
    if size == 1:
        return
    copies = runner.run(inputs[np.full(size, rows[0])])
    yield "duplicates", copies, np.broadcast_to(answers[0], copies.shape)
    order = generator.permutation(size)
    yield "permutations", runner.run(inputs[rows[order]]), answers[order]
    kept = int(watched[0])
    strangers = (rows + 1 + generator.integers(0, max(1, len(inputs) - 2))) % len(inputs)
    strangers[kept] = rows[kept]
    yield "neighbours", runner.run(inputs[strangers])[kept : kept + 1], answers[kept : kept + 1]


def _trial(way: str, batch: int, logits: NDArray[Any], ordinary: NDArray[Any], limit: Limit) -> Trial:
    largest = distance(logits, ordinary)
    return Trial(
        way=way,
        batch=batch,
        largest=largest,
        same_bits=bool(np.array_equal(logits, ordinary)),
        passed=largest <= limit.largest,
    )
