"""Time programs in turn, so that all slow down alike if the machine does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gmmvit_deploy.progress import OnProgress, Progress, ignore

__all__ = ["ROUNDS_OF_PROOF", "TimeRatio", "ratio_of", "seconds_in_turn", "time_ratio"]

_SECONDS = 1.5
"""The seconds of a measurement of two programs."""
_LEAST_ROUNDS = 3
ROUNDS_OF_PROOF = 6
"""In fewer rounds, all ratios lie on one side of 1 by chance in more than 5 % of the measurements of equal programs."""
_TURN_S = 0.03
"""The least seconds of each half of a turn. The first half is untimed: threads of the program before may still spin."""


class TimeRatio(NamedTuple):
    """How long the base takes, divided by how long the other program takes.

    median: of the ratios of all rounds.  low, high: its interval of 95 %, or all ratios if fewer than six.
    """

    median: float
    low: float
    high: float


def time_ratio(base: Callable[[], object], other: Callable[[], object]) -> TimeRatio:
    """Run two programs in turn for some seconds, and return how many times as fast the other is."""
    return ratio_of(*seconds_in_turn((base, other)))


def seconds_in_turn(
    programs: Sequence[Callable[[], object]],
    *,
    times: int = 1,
    rounds: int | None = None,
    turn_s: float = _TURN_S,
    on_progress: OnProgress = ignore,
) -> list[list[float]]:
    """Run any number of programs in turn, and return the seconds of each program in each round.

    times: multiplies the time of the measurement, and the least number of rounds.
    rounds: the number of rounds, whatever time they take; None measures for a time.
    turn_s: the least seconds of each half of a turn.
    """
    event = Progress("percent of the time", total=100)
    on_progress(event)
    for run in programs:
        run()  # OpenVINO compiles the graph for this size
    seconds: list[list[float]] = [[] for _ in programs]
    duration = times * _SECONDS * len(programs) / 2 if rounds is None else 0.0
    least = times * _LEAST_ROUNDS if rounds is None else rounds
    start = time.perf_counter()
    done = 0
    while done < least or time.perf_counter() < start + duration:
        numbers = range(len(programs))
        for number in numbers if done % 2 else reversed(numbers):
            seconds[number].append(_turn(programs[number], turn_s))
        done += 1
        passed = (time.perf_counter() - start) / duration if duration else 1.0
        on_progress(replace(event, done=int(100 * min(done / least, passed, 1))))
    return seconds


def ratio_of(base: Sequence[float], other: Sequence[float]) -> TimeRatio:
    """Return how many times as fast the other program is, from the seconds of both in each round."""
    ordered = sorted(before / after for before, after in zip(base, other, strict=True))
    # The sign test: the true median lies between these order statistics in 95 % of the samples.
    outer = max(math.floor((len(ordered) - 1.96 * math.sqrt(len(ordered))) / 2), 0)
    return TimeRatio(float(np.median(ordered)), ordered[outer], ordered[-1 - outer])


def _turn(run: Callable[[], object], least_s: float) -> float:
    """Return the seconds of a run."""
    _repeated(run, least_s)
    return _repeated(run, least_s)


def _repeated(run: Callable[[], object], least_s: float) -> float:
    start, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - start < least_s:
        run()
        count += 1
    return (time.perf_counter() - start) / count
