"""Time two programs in turn, so that both slow down alike if the machine does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

__all__ = ["TimeRatio", "time_ratio"]

_SECONDS = 1.5
_LEAST_ROUNDS = 3
_TURN_S = 0.03
"""The least seconds of each half of a turn. The first half is untimed: threads of the other program may still spin."""


class TimeRatio(NamedTuple):
    """How long the base takes, divided by how long the other program takes.

    median: of the ratios of all rounds.  low, high: its interval of 95 %, or all ratios if fewer than six.
    """

    median: float
    low: float
    high: float


def time_ratio(base: Callable[[], object], other: Callable[[], object]) -> TimeRatio:
    """Run two programs in turn for some seconds, and return how many times as fast the other is."""
    base(), other()  # OpenVINO compiles the graph for this size
    ratios: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(ratios) < _LEAST_ROUNDS or time.perf_counter() < end:
        order = (base, other) if len(ratios) % 2 else (other, base)
        seconds = {one: _turn(one) for one in order}
        ratios.append(seconds[base] / seconds[other])
    ordered = sorted(ratios)
    # The sign test: the true median lies between these order statistics in 95 % of the samples.
    outer = max(math.floor((len(ordered) - 1.96 * math.sqrt(len(ordered))) / 2), 0)
    return TimeRatio(float(np.median(ordered)), ordered[outer], ordered[-1 - outer])


def _turn(run: Callable[[], object]) -> float:
    """Return the seconds of a run."""
    _repeated(run)
    return _repeated(run)


def _repeated(run: Callable[[], object]) -> float:
    start, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - start < _TURN_S:
        run()
        count += 1
    return (time.perf_counter() - start) / count
