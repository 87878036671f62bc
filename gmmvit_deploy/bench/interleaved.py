"""Time programs side by side in a single process: interleaved rounds, so that ratios can be taken within rounds.

A machine that slows down affects every program of a round alike. `statistics.ratio` computes a ratio with its
interval from the rounds' times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.bench.core_to_core import round_trip_ns

__all__ = ["UNTIMED_S", "Program", "Timed", "repeats_of", "time_in_turn", "time_rounds", "turns"]

Program = Callable[[NDArray[Any]], NDArray[Any]]
"""Images (B, channels, height, width) → logits (B, classes)."""

UNTIMED_S = 0.03
"""Seconds that a program runs untimed at the start of its turn: threads of the previous program spin for some
milliseconds before they sleep."""
_WARM_UP_ROUNDS = 3  # they fill caches and start threads
_IMAGES_A_TURN = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timed:
    """The measurements of `time_rounds`, by program name, except ``images``.

    ms: time of each round.  core_to_core_ns: for each round the larger of the round trips measured before and after
    the turn; NaN if it cannot be measured.  logits: of the last timed round.  images: the inputs of that round.
    """

    ms: dict[str, NDArray[Any]]
    core_to_core_ns: dict[str, NDArray[Any]]
    logits: dict[str, NDArray[Any]]
    images: NDArray[Any]


def turns(
    names: Sequence[str], rounds: int, generator: np.random.Generator, *, warm_ups: int = 0
) -> Iterator[tuple[str, bool]]:
    """Yield (name, whether its time counts): every name once in each round, in a newly shuffled order.

    A name and the same name with the suffix `` plain`` are adjacent.
    warm_ups: additional rounds at the start, whose times do not count.
    """
    for number in range(warm_ups + rounds):
        groups: dict[str, list[str]] = {}
        for name in generator.permutation(list(names)):
            groups.setdefault(str(name).removesuffix(" plain"), []).append(str(name))
        for group in groups.values():
            for name in group:
                yield name, number >= warm_ups


def repeats_of(batch: int) -> int:
    """Return how many runs a turn times: as many as 32 images need, at least 1."""
    return max(1, _IMAGES_A_TURN // batch)


def time_rounds(
    programs: Mapping[str, Program | Sequence[Program]],
    batch: int,
    rounds: int,
    *,
    image_shape: tuple[int, int, int],
) -> Timed:
    """Run every program in every round, all programs of a round on the same random images.

    image_shape: (channels, height, width), as `specs.input_shape` gives it.
    If a program is given as several copies, each turn runs a random copy: the place of the weights in memory makes
    copies differ by up to 2 % in speed.
    """
    generator = np.random.default_rng(batch)
    times: dict[str, list[float]] = {name: [] for name in programs}
    apart: dict[str, list[float]] = {name: [] for name in programs}
    logits: dict[str, NDArray[Any]] = {}
    images = np.empty(0, np.float32)
    repeats = repeats_of(batch)
    after = _apart()
    for number, (name, timed) in enumerate(turns(list(programs), rounds, generator, warm_ups=_WARM_UP_ROUNDS)):
        if number % len(programs) == 0:
            images = generator.standard_normal((batch, *image_shape), dtype=np.float32)
        # Run instead of pausing: a pause would also let the other threads sleep, but idle cores may be rescheduled
        # onto cores further apart.
        program = _random_copy(programs[name], generator)
        before = after
        until = time.perf_counter() + UNTIMED_S
        program(images)
        while time.perf_counter() < until:
            program(images)
        start = time.perf_counter()
        for _ in range(repeats):
            logits[name] = program(images)
        elapsed = (time.perf_counter() - start) / repeats
        after = _apart()
        if timed:
            times[name].append(elapsed * 1e3)
            apart[name].append(max(before, after))
    return Timed(
        ms={name: np.array(values) for name, values in times.items()},
        core_to_core_ns={name: np.array(values) for name, values in apart.items()},
        logits=logits,
        images=images,
    )


def time_in_turn(
    first: Program, second: Program, images: NDArray[Any], count: int, repeats: int
) -> tuple[NDArray[Any], list[NDArray[Any]]]:
    """Time two programs on the same images in ``count`` short turns; the programs alternate in starting a turn.

    In a turn each program makes an untimed run, which fills the caches with its data, and ``repeats`` timed runs.
    Returns (milliseconds (2, count), the logits of both).
    """
    programs = (first, second)
    times = np.empty((2, count))
    logits = [program(images) for program in programs]  # also starts threads
    for turn in range(count):
        for index in (0, 1) if turn % 2 else (1, 0):
            program = programs[index]
            program(images)
            start = time.perf_counter()
            for _ in range(repeats):
                logits[index] = program(images)
            times[index, turn] = (time.perf_counter() - start) / repeats * 1e3
    return times, logits


def _apart() -> float:
    measured = round_trip_ns()
    return float("nan") if measured is None else measured


def _random_copy(program: Program | Sequence[Program], generator: np.random.Generator) -> Program:
    return program[generator.integers(len(program))] if isinstance(program, Sequence) else program
