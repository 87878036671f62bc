"""Timing several programs side by side: rounds interleaved, ratios within rounds, intervals by bootstrap."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from core_to_core import round_trip_ns

from gmmvit_deploy.bench import statistics

__all__ = ["Program", "Timed", "in_words", "ratio", "time_in_turn", "time_rounds"]

Program = Callable[[np.ndarray], np.ndarray]

_WARM_UP_ROUNDS = 3  # they fill caches and start threads
_IMAGES_A_TURN = 32
_UNTIMED_S = 0.03


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timed:
    """What `time_rounds` found, by program but for ``images``.

    ms: of each round.  core_to_core_ns: of each round, the larger of just before and just after its turn; nan where it
    cannot be measured.  logits: of the last timed round.  images: it had.
    """

    ms: dict[str, np.ndarray]
    core_to_core_ns: dict[str, np.ndarray]
    logits: dict[str, np.ndarray]
    images: np.ndarray


def time_rounds(
    programs: Mapping[str, Program | Sequence[Program]], batch: int, rounds: int, *, image_size: int = 32
) -> Timed:
    """Run every program in every round on the same random images, in random order but twins one after the other:
    a program, and the one of its name and `` plain``.

    A program takes images (B, 3, S, S) and gives logits. A drifting machine drifts for all. Of several copies of a
    program each round runs one: where its weights happen to lie in memory makes one copy up to 2 % faster than another.
    """
    generator = np.random.default_rng(batch)
    times: dict[str, list[float]] = {name: [] for name in programs}
    apart: dict[str, list[float]] = {name: [] for name in programs}
    logits: dict[str, np.ndarray] = {}
    repeats = max(1, _IMAGES_A_TURN // batch)
    after = _apart()
    for round_number in range(rounds + _WARM_UP_ROUNDS):
        images = generator.standard_normal((batch, 3, image_size, image_size), dtype=np.float32)
        for name in _order(list(programs), generator):
            # Untimed until the threads of the program before, which spin for some milliseconds, have gone to sleep. A
            # pause would do that too, but cores that idle may be elsewhere when they wake, further from each other.
            program = _one_of(programs[name], generator)
            before = after
            until = time.perf_counter() + _UNTIMED_S
            program(images)
            while time.perf_counter() < until:
                program(images)
            start = time.perf_counter()
            for _ in range(repeats):
                logits[name] = program(images)
            elapsed = (time.perf_counter() - start) / repeats
            after = _apart()
            if round_number >= _WARM_UP_ROUNDS:
                times[name].append(elapsed * 1e3)
                apart[name].append(max(before, after))
    return Timed(
        ms={name: np.array(values) for name, values in times.items()},
        core_to_core_ns={name: np.array(values) for name, values in apart.items()},
        logits=logits,
        images=images,
    )


def time_in_turn(
    one: Program, other: Program, images: np.ndarray, turns: int, repeats: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Time two programs on the same images in short turns, each of them first in every other one.

    A turn is one untimed run, so that the caches hold what this program reads, and ``repeats`` timed ones.
    Returns (milliseconds (2, turns), the logits of both).
    """
    programs = (one, other)
    times = np.empty((2, turns))
    logits = [program(images) for program in programs]  # also starts threads
    for turn in range(turns):
        for index in (0, 1) if turn % 2 else (1, 0):
            program = programs[index]
            program(images)
            start = time.perf_counter()
            for _ in range(repeats):
                logits[index] = program(images)
            times[index, turn] = (time.perf_counter() - start) / repeats * 1e3
    return times, logits


def _apart() -> float:
    found = round_trip_ns()
    return float("nan") if found is None else found


def _order(names: list[str], generator: np.random.Generator) -> list[str]:
    groups: dict[str, list[str]] = {}
    for name in generator.permutation(names):
        groups.setdefault(name.removesuffix(" plain"), []).append(str(name))
    return [name for group in groups.values() for name in group]


def _one_of(program: Program | Sequence[Program], generator: np.random.Generator) -> Program:
    return program[generator.integers(len(program))] if isinstance(program, Sequence) else program


def ratio(above: np.ndarray, below: np.ndarray) -> dict[str, float]:
    """Median of the ratios within rounds, and its 95 % bootstrap interval."""
    return asdict(statistics.ratio(above.tolist(), below.tolist()))


def in_words(found: dict[str, float]) -> str:
    """A `ratio` with its interval."""
    return f"{found['median']:.3f} ({found['low']:.3f}–{found['high']:.3f})"
