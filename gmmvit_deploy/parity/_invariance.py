"""Check that an image's logits do not depend on the other images of its batch.

Each trial runs the same images in an ordinary batch and in another batch, and compares the logits:

    alone         the image of row k runs without other images; copies of this image fill the smallest batch that the
                  runner takes
    duplicates    the same image is in every row; every row must have the logits of this image
    permutations  the images are in another order; the logits must be in the same order as the images
    neighbours    in the smallest batch, where no image runs alone: the image of row k stays, and every other row has
                  another image; the logits of row k must not change

The batch sizes are, for each range of batch sizes that the runner takes (for an engine: each optimisation profile), the
three smallest sizes, an odd size in the middle, and the largest size. Two runs of the same image may round differently,
so the logits may differ by the limit that also applies to the distance from PyTorch's float64 logits. Mixed-up rows are
detected without this limit: a row is mixed up if the logits are far nearer to the float64 logits of another row's image
than to the float64 logits of the row's own image.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.parity._numeric import NumericCheck
from gmmvit_deploy.parity._runner_check import RunnerCheck
from gmmvit_deploy.parity._verdict import Check, passed_unless
from gmmvit_deploy.parity.measures import distance
from gmmvit_deploy.progress import Progress
from gmmvit_deploy.runtimes.runners.runner import Runner

_ROWS_ALONE = 4
_SEED = 2


def batch_sizes(ranges: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """Return the batch sizes to test for ranges (smallest size, largest size), ascending and distinct."""
    sizes = set()
    for low, high in ranges:
        middle = (low + high) // 2
        odd = middle + 1 - middle % 2
        sizes |= {size for size in (low, low + 1, low + 2, odd, high) if low <= size <= high}
    return tuple(sorted(sizes))


def mixed_up(logits: NDArray[Any], expected: NDArray[Any]) -> list[tuple[int, int]]:
    """Return (row, other row) for every row of logits (B, C) that is far nearer to another row of the expected (B, C).

    "Far nearer" means less than a quarter of the Euclidean distance from the row's own expected logits, so that the
    rounding of a coarse precision is not mistaken for the logits of another row.
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


class InvarianceCheck(RunnerCheck):
    name = "batch invariance"

    def judge(self) -> Check:
        runner, limit = self.runner, self.tested.check(NumericCheck).kept_limit
        inputs, exact = self.run.sent.batch.inputs, self.run.sent.exact
        sizes = batch_sizes(runner.ranges)
        trials: list[dict[str, Any]] = []
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
                largest = distance(logits, ordinary)
                trials.append(
                    {
                        "way": way,
                        "batch": size,
                        "largest": largest,
                        "same_bits": bool(np.array_equal(logits, ordinary)),
                        "passed": largest <= limit.largest,
                    }
                )
                self.tested.on_progress(Progress(f"{way}, batch {size}"))
        reasons += [
            f"trial {trial['way']!r} at batch {trial['batch']}: a row's logits change by {trial['largest']:.3g}; "
            f"expected at most {limit.largest:.3g}"
            for trial in trials
            if not trial["passed"]
        ]
        worst = max((trial["largest"] for trial in trials), key=lambda value: np.inf if np.isnan(value) else value)
        same = sum(trial["same_bits"] for trial in trials)
        summary = (
            f"batches of {', '.join(map(str, sizes))}: a row's logits change by at most {worst:.2g} "
            f"(limit {limit.largest:.2g}); bit for bit the same in {same} of {len(trials)} trials"
        )
        return passed_unless(reasons, self.name, summary, batches=list(sizes), limit=limit.largest, trials=trials)


def _ways(
    runner: Runner, inputs: NDArray[Any], rows: NDArray[Any], answers: NDArray[Any], generator: np.random.Generator
) -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
    """Yield (name of a trial, its logits, the same images' among ``answers``, the logits of ``inputs[rows]``)."""
    size = len(rows)
    smallest = min(low for low, _ in runner.ranges)
    watched = generator.permutation(size)[:_ROWS_ALONE]
    if size > smallest:
        alone = [runner.run(inputs[np.resize(rows[row], smallest)])[:1] for row in watched]
        yield "alone", np.concatenate(alone), answers[watched]
    if size == 1:
        return
    if size == smallest:
        kept = int(watched[0])
        strangers = (rows + 1 + generator.integers(0, max(1, len(inputs) - 2))) % len(inputs)
        strangers[kept] = rows[kept]
        yield "neighbours", runner.run(inputs[strangers])[kept : kept + 1], answers[kept : kept + 1]
    copies = runner.run(inputs[np.full(size, rows[0])])
    yield "duplicates", copies, np.broadcast_to(answers[0], copies.shape)
    order = generator.permutation(size)
    yield "permutations", runner.run(inputs[rows[order]]), answers[order]
