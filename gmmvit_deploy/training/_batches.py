"""Which images are in which step, and the seed of each image: functions of the seed, the epoch and the position.

No random number of a run depends on what ran before. A resumed run therefore restores no state of a generator, and the
number of worker processes changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain

import numpy as np
import torch
from torch.utils.data import DistributedSampler, Sampler

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.extras import require
from gmmvit_deploy.training.recipe import Recipe

Key = tuple[int, int]
"""(index of an image, seed of its augmentation)."""
_REPEATS = 3


class Batches(Sampler[list[Key]]):
    """The batches of all epochs for a process, from step ``first`` on, without incomplete batches.

    count: the number of images.  rank, processes: the number of this process, and of all processes.
    steps: the number of steps in an epoch.
    Errors: InputError when the batch is larger than an epoch, or does not divide into even parts for the processes.
    """

    def __init__(self, count: int, recipe: Recipe, *, seed: int, rank: int = 0, processes: int = 1) -> None:
        self._count, self._recipe, self._seed, self._rank, self._processes = count, recipe, seed, rank, processes
        self.first = 0
        if recipe.batch % (2 * processes):
            raise InputError(
                f"--batch {recipe.batch}: expected a multiple of {2 * processes}: Mixup pairs the images of a batch in "
                f"each of {processes} processes",
                hint=f"type --batch {-(-recipe.batch // (2 * processes)) * 2 * processes}",
            )
        self._batch = recipe.batch // processes
        self.steps = len(self._order(0)) // self._batch
        if not self.steps:
            raise InputError(
                f"--batch {recipe.batch}: expected at most the {len(self._order(0)) * processes} images of an epoch",
                hint="type a smaller --batch",
            )

    def __len__(self) -> int:
        return self._recipe.epochs * self.steps - self.first

    def __iter__(self) -> Iterator[list[Key]]:
        start, step = divmod(self.first, self.steps)
        for epoch in range(start, self._recipe.epochs):
            order = self._order(epoch)
            seeds = np.random.default_rng((self._seed, epoch)).integers(2**62, size=len(order) * self._processes)
            keys = list(zip(order, seeds[self._rank :: self._processes].tolist(), strict=True))
            for number in range(step, self.steps):
                yield keys[number * self._batch : (number + 1) * self._batch]
            step = 0

    def _order(self, epoch: int) -> list[int]:
        images: list[int] = [*range(self._count)]
        if self._recipe.repetition == "batches":
            timm = require("timm.data.distributed_sampler", package="timm", extra="train")
            repeated = timm.RepeatAugSampler(images, self._processes, self._rank, num_repeats=_REPEATS)
            repeated.set_epoch(_mixed(self._seed, epoch))
            return list(repeated)
        passes = _REPEATS if self._recipe.repetition == "passes" else 1
        sampler: DistributedSampler[int] = DistributedSampler(
            images,  # type: ignore[arg-type]  # only the length of the list is read
            self._processes,
            self._rank,
        )
        orders = []
        for number in range(passes):
            sampler.set_epoch(_mixed(self._seed, epoch, number))
            orders.append(list(sampler))
        return list(chain.from_iterable(orders))


def seed_everything(*numbers: int) -> None:
    """Seed the generators of Python, numpy and torch, on every device."""
    seed = _mixed(*numbers)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def seed_image(seed: int) -> None:
    """Seed the generator of the augmentations of an image."""
    # `torch.manual_seed` would also queue the seed for GPUs, once for each image.
    torch.default_generator.manual_seed(seed)


def _mixed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])
