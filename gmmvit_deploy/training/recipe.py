"""`Recipe`: the numbers of a training run.  This module imports nothing heavy, so that the command line can list them.

The recipe ``paper`` has the defaults of the released code of "Toward a Deeper Understanding: RetNet Viewed through
Convolution". ``light`` is for small data sets and few epochs: random crops and label smoothing only.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from gmmvit_deploy.errors import InputError

Repetition: TypeAlias = Literal["passes", "batches", "none"]
"""passes: an epoch is three passes over the images, as in the released code. batches: an image is three times in a
batch, each time augmented differently, and an epoch has a third of the images, as "repeated augmentation" is defined.
none: an epoch is a pass over the images."""
REPETITIONS: tuple[Repetition, ...] = get_args(Repetition)

Policy: TypeAlias = Literal["cifar10", "svhn", "imagenet", "none"]
"""The policy of AutoAugment, by the data set on which it was found."""
POLICIES: tuple[Policy, ...] = get_args(Policy)

_POLICY_OF: dict[str, Policy] = {
    "cifar10": "cifar10",
    "cifar100": "cifar10",
    "svhn": "svhn",
    "mnist": "svhn",
    "digits": "svhn",
}
_DIGITS = ("svhn", "mnist", "digits")  # a mirrored digit is another sign
SIDES = {"cifar10": 32, "cifar100": 32, "svhn": 32, "tiny-imagenet": 64, "mnist": 32, "digits": 32}
"""Kind of data → the usual side of its images in pixels; the other kinds have images of any size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The numbers of a training run.

    epochs, batch: the number of epochs, and of the images of a step over all processes.
    repetition: what an epoch is.
    rate: the learning rate after the warm-up; it falls to ``min_rate`` along a cosine.
    warmup: the share of all steps in which the rate rises from ``min_rate``.
    weight_decay: of AdamW.  decays_masks: True if the parameters of the masks decay, as in the released code.
    smoothing: label smoothing.  mixing: the share of the batches with CutMix or Mixup, each half of them.
    drop_path: the probability of stochastic depth in the last block; it grows from 0 in the first block.
    policy: of AutoAugment.  padding: the pixels around an image before a random crop.  flip: True to mirror half of the
    images.  erasing: the probability of random erasing.
    ema: the decay of the moving average of the weights; 0 for no average.
    clip: the largest norm of the gradients; 0 for no limit.
    Errors: InputError when a value is out of range.
    """

    epochs: int = 100
    batch: int = 128
    repetition: Repetition = "passes"
    rate: float = 1e-3
    min_rate: float = 1e-6
    warmup: float = 0.1
    weight_decay: float = 0.05
    decays_masks: bool = True
    smoothing: float = 0.1
    mixing: float = 0.5
    drop_path: float = 0.1
    policy: Policy = "imagenet"
    padding: int = 4
    flip: bool = True
    erasing: float = 0.25
    ema: float = 0.0
    clip: float = 0.0

    def __post_init__(self) -> None:
        for name, option in (("epochs", "--epochs"), ("batch", "--batch")):
            if getattr(self, name) < 1:
                raise InputError(f"{option}: expected at least 1, got {getattr(self, name)}")
        if not 0 < self.rate < math.inf:
            raise InputError(f"--rate: expected a number above 0, got {self.rate:g}")
        if not 0 <= self.weight_decay < math.inf:
            raise InputError(f"--weight-decay: expected a number of at least 0, got {self.weight_decay:g}")
        if self.padding < 0:
            raise InputError(f"--padding: expected at least 0, got {self.padding}")
        for name, option in (("drop_path", "--drop-path"), ("ema", "--ema")):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{option}: expected at least 0 and less than 1, got {getattr(self, name):g}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


RECIPES: dict[str, Recipe] = {
    "paper": Recipe(),
    "light": Recipe(
        epochs=24,
        batch=64,
        repetition="none",
        rate=2e-3,
        warmup=0.2,
        smoothing=0.05,
        mixing=0,
        drop_path=0,
        policy="none",
        padding=2,
        flip=False,
        erasing=0,
        clip=1.0,
    ),
}


def recipe_from(name: str, kind: str, **changes: Any) -> Recipe:
    """Return a recipe of `RECIPES` for a kind of data, with the values of ``changes`` that are not None.

    kind: a name of ``data.files.KINDS``; it determines the policy of AutoAugment, and whether images are mirrored.
    Errors: InputError when a value is out of range.
    """
    recipe = RECIPES[name]
    if recipe.policy != "none":
        recipe = replace(recipe, policy=_POLICY_OF.get(kind, "imagenet"), flip=kind not in _DIGITS)
    return replace(recipe, **{field: value for field, value in changes.items() if value is not None})
