"""Time several programs in a single process: in every round, each program runs once.

If the machine slows down, all programs of a round slow down alike. Ratios of times are therefore computed within
rounds: `statistics.ratio` computes such a ratio and its interval.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["UNTIMED_S", "Program", "Timed", "repeats_of", "time_in_turn", "time_rounds", "turns"]

Program = Callable[[NDArray[Any]], NDArray[Any]]
"""Images (B, channels, height, width) → logits (B, classes)."""

UNTIMED_S = 0.03
"""The seconds that a program runs untimed at the start of its turn. During this time, the threads of the previous
program go to sleep: these threads spin for some milliseconds after their last work."""
_WARM_UP_ROUNDS = 3  # rounds without timing, which fill caches and start threads
_IMAGES_A_TURN = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timed:
    """The measurements of `time_rounds`.

    ms: name of the program → the time of a run in each round, in milliseconds.
    logits: name of the program → the logits of the last round.  images: the inputs of the last round.
    """

    ms: dict[str, NDArray[Any]]
    logits: dict[str, NDArray[Any]]
    images: NDArray[Any]


def turns(
    names: Sequence[str], rounds: int, generator: np.random.Generator, *, warm_ups: int = 0
) -> Iterator[tuple[str, bool]]:
    """Yield (name, timed) for each turn: every name once in each round, in a new random order in every round.

    A name and the same name with the suffix `` plain`` follow each other.
    timed: False for the turns of warm-up rounds.  warm_ups: the number of warm-up rounds, which come first.
    """
    for number in range(warm_ups + rounds):
        groups: dict[str, list[str]] = {}
        for name in generator.permutation(list(names)):
            groups.setdefault(str(name).removesuffix(" plain"), []).append(str(name))
        for group in groups.values():
            for name in group:
                yield name, number >= warm_ups


def repeats_of(batch: int) -> int:
    """Return the number of timed runs in a turn: as many batches as fit into 32 images, and at least 1."""
    return max(1, _IMAGES_A_TURN // batch)


def time_rounds(
    programs: Mapping[str, Program | Sequence[Program]],
    batch: int,
    rounds: int,
    *,
    image_shape: tuple[int, int, int],
) -> Timed:
    """Run every program in every round.  All programs of a round run on the same random images.

    programs: name → program, or name → several copies of a program. Copies differ by up to 2 % in speed, because their
    weights lie at different addresses in memory. Each turn therefore runs a randomly chosen copy.
    image_shape: (channels, height, width), as `specs.input_shape` returns it.
    """
    generator = np.random.default_rng(batch)
    times: dict[str, list[float]] = {name: [] for name in programs}
    logits: dict[str, NDArray[Any]] = {}
    images = np.empty(0, np.float32)
    repeats = repeats_of(batch)
    for number, (name, timed) in enumerate(turns(list(programs), rounds, generator, warm_ups=_WARM_UP_ROUNDS)):
        if number % len(programs) == 0:
            images = generator.standard_normal((batch, *image_shape), dtype=np.float32)
        # The program runs untimed until the threads of the previous program sleep. These threads would also sleep after
        # a pause, but a hypervisor may move the cores further apart while the cores are idle.
        program = _random_copy(programs[name], generator)
        until = time.perf_counter() + UNTIMED_S
        program(images)
        while time.perf_counter() < until:
            program(images)
        start = time.perf_counter()
        for _ in range(repeats):
            logits[name] = program(images)
        elapsed = (time.perf_counter() - start) / repeats
        if timed:
            times[name].append(elapsed * 1e3)
    return Timed(
        ms={name: np.array(values) for name, values in times.items()},
        logits=logits,
        images=images,
    )


def time_in_turn(
    first: Program, second: Program, images: NDArray[Any], count: int, repeats: int
) -> tuple[NDArray[Any], list[NDArray[Any]]]:
    """Time two programs on the same images, in ``count`` short turns.

    In a turn, each program makes an untimed run, which fills the caches, and then ``repeats`` timed runs. ``first``
    runs first in every other turn.
    Returns (times, logits). times: milliseconds of a run, (2, count).  logits: the logits of each program.
    """
    programs = (first, second)
    times = np.empty((2, count))
    logits = [program(images) for program in programs]  # this untimed run also starts the threads of the programs
    for turn in range(count):
        for index in (0, 1) if turn % 2 else (1, 0):
            program = programs[index]
            program(images)
            start = time.perf_counter()
            for _ in range(repeats):
                logits[index] = program(images)
            times[index, turn] = (time.perf_counter() - start) / repeats * 1e3
    return times, logits


def _random_copy(program: Program | Sequence[Program], generator: np.random.Generator) -> Program:
    return program[generator.integers(len(program))] if isinstance(program, Sequence) else program
