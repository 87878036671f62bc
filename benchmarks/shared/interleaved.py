"""Time several programs in a single process: in every round, each program runs once, so all slow down alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.measure.turns import seconds_of_turn

Program = Callable[[NDArray[Any]], NDArray[Any]]
"""Images (B, channels, height, width) → logits (B, classes)."""

_WARM_UP_ROUNDS = 3  # rounds without timing, which fill caches and start threads


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timed:
    """The measurements of `time_rounds`.

    ms: name → the time of each round.  logits, images: of the last round.
    """

    ms: dict[str, NDArray[Any]]
    logits: dict[str, NDArray[Any]]
    images: NDArray[Any]


def turns(
    names: Sequence[str], rounds: int, generator: np.random.Generator, *, warm_ups: int = 0
) -> Iterator[tuple[str, bool]]:
    """Yield (name, timed): every name once in each round, in a random order, and `` plain`` beside its twin.

    timed: False in the warm-up rounds, which come first.
    """
    for number in range(warm_ups + rounds):
        groups: dict[str, list[str]] = {}
        for name in generator.permutation(list(names)):
            groups.setdefault(str(name).removesuffix(" plain"), []).append(str(name))
        for group in groups.values():
            for name in group:
                yield name, number >= warm_ups


def time_rounds(
    programs: Mapping[str, Program | Sequence[Program]],
    batch: int,
    rounds: int,
    *,
    image_shape: tuple[int, int, int],
) -> Timed:
    """Run every program in every round, all on the same random images.

    programs: name → copies; each turn runs a random copy, because the place of the weights changes the speed by up to 2
    %.
    """
    generator = np.random.default_rng(batch)
    times: dict[str, list[float]] = {name: [] for name in programs}
    logits: dict[str, NDArray[Any]] = {}
    images = np.empty(0, np.float32)
    for number, (name, timed) in enumerate(turns(list(programs), rounds, generator, warm_ups=_WARM_UP_ROUNDS)):
        if number % len(programs) == 0:
            images = generator.standard_normal((batch, *image_shape), dtype=np.float32)
        program = _random_copy(programs[name], generator)
        seconds = seconds_of_turn(partial(program, images))
        logits[name] = program(images)
        if timed:
            times[name].append(seconds * 1e3)
    return Timed(
        ms={name: np.array(values) for name, values in times.items()},
        logits=logits,
        images=images,
    )


def _random_copy(program: Program | Sequence[Program], generator: np.random.Generator) -> Program:
    return program[generator.integers(len(program))] if isinstance(program, Sequence) else program
