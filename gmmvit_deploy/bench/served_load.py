"""Search the highest rate of LoadGen's Server scenario at which the p99 latency stays within a bound."""

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

_STEPS = 6
_QUERIES = ENOUGH[0.99]
_MIN_SECONDS = 2.0
_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """A trial of an arrival rate.  Latencies begin at each query's scheduled time.  holds: p99 within the bound."""

    rate: float
    queries: int
    p99_ms: float
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSearch:
    """The result of a search.  best: the trial with the highest rate within the bound, or None."""

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
    max_rate: float,
    on_progress: OnProgress = ignore,
) -> LoadSearch:
    """Search by bisection, in six steps, the highest rate whose p99 latency stays within the bound.

    Of a rate beyond the bound, two of three trials decide: a short pause of the machine would exclude all higher rates.
    Every trial has the queries that a p99 needs (`measure.statistics`).

    max_rate: the samples a second when all are available at once, the highest rate to try.
    """
    # A server forms batches itself, so the queries to a server are single samples.
    batch = 1 if runner.server is not None else min(_BATCH, runner.max_batch, len(inputs))
    for size in {1, batch // 2 - 1, batch - 1, batch} & set(range(1, batch + 1)):
        runner.run(inputs[:size])  # the first run of a batch size may compile, and must not be timed
    points: list[LoadPoint] = []
    answers = Answers(expected)
    low, high = 0.0, max_rate

    def tried(rate: float) -> LoadPoint:
        on_progress(Progress(f"{runner.label}: {rate:.0f} requests a second"))
        run = drive(
            runner.run,
            Work(
                scenario="Server",
                inputs=inputs,
                queries=max(_QUERIES, round(rate * _MIN_SECONDS)),
                batch=batch,
                callers=runner.callers,
                rate=rate,
                bound_ms=bound_ms,
                seed=len(points) + 1,
            ),
        )
        answers.add(run.indices, run.outputs)
        p99 = nearest_rank(run.latencies_ms, 0.99)
        queries = len(run.latencies_ms)
        points.append(LoadPoint(rate=rate, queries=queries, p99_ms=p99, holds=p99 <= bound_ms))
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
    """Try a rate; return a trial within the bound, or None if two of three trials exceeded it."""
    first = tried()
    if first.holds:
        return first
    second = tried()
    if not second.holds:
        return None
    third = tried()
    return max(second, third, key=lambda trial: trial.p99_ms) if third.holds else None
