"""Time programs in turn, so that all slow down alike if the machine does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from gmmvit_deploy.intervals import Measured
from gmmvit_deploy.measure.statistics import ratio
from gmmvit_deploy.progress import OnProgress, Progress, ignore

_SECONDS = 1.5
"""The seconds of a measurement of two programs."""
_MIN_ROUNDS = 3
UNTIMED_S = 0.03
"""The minimum seconds that a program runs untimed at the start of its turn. The threads of the program before spin for
some milliseconds after their last work. They would also sleep after a pause, but a hypervisor may move the cores
further apart while they are idle."""


def time_ratio(base: Callable[[], object], other: Callable[[], object]) -> Measured:
    """Run two programs in turn for some seconds, and return how many times as fast the other is."""
    return ratio(*seconds_in_turn((base, other)))


def seconds_in_turn(
    programs: Sequence[Callable[[], object]],
    *,
    times: int = 1,
    rounds: int | None = None,
    turn_s: float = UNTIMED_S,
    on_progress: OnProgress = ignore,
) -> list[list[float]]:
    """Run any number of programs in turn, and return the seconds of each program in each round.

    times: multiplies the time, and the minimum number of rounds.  rounds: their number; None measures for a time.
    turn_s: the minimum seconds of each half of a turn.
    """
    event = Progress("percent of the time", total=100)
    on_progress(event)
    for run in programs:
        run()  # OpenVINO compiles the graph for this size
    seconds: list[list[float]] = [[] for _ in programs]
    duration = times * _SECONDS * len(programs) / 2 if rounds is None else 0.0
    min_rounds = times * _MIN_ROUNDS if rounds is None else rounds
    start = time.perf_counter()
    done = 0
    while done < min_rounds or time.perf_counter() < start + duration:
        numbers = range(len(programs))
        for number in numbers if done % 2 else reversed(numbers):
            seconds[number].append(seconds_of_turn(programs[number], turn_s))
        done += 1
        passed = (time.perf_counter() - start) / duration if duration else 1.0
        on_progress(replace(event, done=int(100 * min(done / min_rounds, passed, 1))))
    return seconds


def seconds_of_turn(run: Callable[[], object], min_s: float = UNTIMED_S) -> float:
    """Run a program untimed, then timed, each for ``min_s``, at least once; return the mean seconds of a timed run."""
    settle(run, min_s)
    return seconds_of(run, min_s)


def settle(run: Callable[[], object], min_s: float = UNTIMED_S) -> None:
    """Start the turn of a program: run it untimed, which also fills caches and wakes its threads."""
    seconds_of(run, min_s)


def seconds_of(run: Callable[[], object], min_s: float = 0.0) -> float:
    """Return the mean seconds of a run: of a single run, or of the runs in ``min_s``."""
    start, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - start < min_s:
        run()
        count += 1
    return (time.perf_counter() - start) / count
