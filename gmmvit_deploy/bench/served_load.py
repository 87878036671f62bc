"""Search the highest rate of random arrivals at which the p99 latency stays within a bound.

The arrivals follow LoadGen's Server scenario (`measure.load`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from numpy.typing import NDArray

from gmmvit_deploy.bench.outputs import Answers, Expected, OutputCheck
from gmmvit_deploy.measure.load import Work, drive
from gmmvit_deploy.measure.statistics import ENOUGH, nearest_rank
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.runtimes.runners.runner import Runner

__all__ = ["LoadPoint", "LoadSearch", "search_rate"]

_STEPS = 6
_QUERIES = ENOUGH[0.99]
_SECONDS_AT_LEAST = 2.0
_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """A trial of an arrival rate.

    rate: the arrivals a second.  queries: the number of queries.
    p50_ms, p99_ms: the 50th and 99th percentile of the latencies, which begin at each query's scheduled time.
    holds: True if the p99 latency stayed within the bound.
    """

    rate: float
    queries: int
    p50_ms: float
    p99_ms: float
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSearch:
    """The result of a search.

    best: the trial with the highest rate whose p99 stayed within the bound; None if no trial stayed within the bound.
    points: all trials, ordered by rate.  outputs: the check of the runner's answers.
    """

    runner: str
    bound_ms: float
    best: LoadPoint | None
    points: tuple[LoadPoint, ...]
    outputs: OutputCheck


def search_rate(
    runner: Runner,
    inputs: NDArray[Any],
    expected: Expected,
    *,
    bound_ms: float,
    most: float,
    on_progress: OnProgress = ignore,
) -> LoadSearch:
    """Search by bisection, in six steps, the highest rate whose p99 latency stays within the bound.

    If the p99 latency of a rate exceeds the bound, the rate is tried again, and two of three trials decide. If a single
    trial decided, a short pause of the machine could raise the p99 latency, and the search would exclude all higher
    rates. Every trial sends at least the minimum number of queries for a p99 (`measure.statistics`).

    inputs: the inputs (N, …) from which samples are drawn.  expected: the expected logits of the inputs.
    bound_ms: the bound of the p99 latency.
    most: the samples a second when all samples are available at once. The runner cannot sustain a higher arrival rate.
    """
    # A server forms batches itself, so the queries to a server are single samples.
    batch = 1 if runner.server is not None else min(_BATCH, runner.max_batch, len(inputs))
    for size in {1, batch // 2 - 1, batch - 1, batch} & set(range(1, batch + 1)):
        runner.run(inputs[:size])  # the first run of a batch size may compile, and must not be timed
    points: list[LoadPoint] = []
    answers = Answers(expected)
    low, high = 0.0, most

    def tried(rate: float) -> LoadPoint:
        on_progress(Progress(f"{runner.label}: {rate:.0f} requests a second"))
        run = drive(
            runner.run,
            Work(
                scenario="Server",
                inputs=inputs,
                queries=max(_QUERIES, round(rate * _SECONDS_AT_LEAST)),
                batch=batch,
                callers=runner.callers,
                rate=rate,
                bound_ms=bound_ms,
                seed=len(points) + 1,
            ),
        )
        answers.add(run.indices, run.outputs)
        p50, p99 = (nearest_rank(run.latencies_ms, share) for share in (0.5, 0.99))
        queries = len(run.latencies_ms)
        points.append(LoadPoint(rate=rate, queries=queries, p50_ms=p50, p99_ms=p99, holds=p99 <= bound_ms))
        return points[-1]

    best: LoadPoint | None = None
    for step in range(_STEPS):
        rate = high * 0.6 if not step else (low + high) / 2
        held = _held(partial(tried, rate))
        best = held or best
        low, high = (rate, high) if held else (low, rate)
    return LoadSearch(
        runner=runner.label,
        bound_ms=bound_ms,
        best=best,
        points=tuple(sorted(points, key=lambda point: point.rate)),
        outputs=answers.check(runner.precision, runner.form),
    )


def _held(tried: Callable[[], LoadPoint]) -> LoadPoint | None:
    """Try a rate; return a trial that stayed within the bound, or None if two of three trials exceeded the bound.

    If the first trial stays within the bound, the function returns this trial. Otherwise the second and third trials
    must stay within the bound, and the function returns the slower of these two.
    """
    first = tried()
    if first.holds:
        return first
    second = tried()
    if not second.holds:
        return None
    third = tried()
    return max(second, third, key=lambda trial: trial.p99_ms) if third.holds else None
