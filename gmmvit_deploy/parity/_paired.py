"""Compare two classifiers, PyTorch and a runner, on the same images: difference of accuracy, and its interval.

    b = number of images that only PyTorch classifies correctly (lost)
    c = number of images that only the runner classifies correctly (gained)
    difference = (c − b) / n, with n the number of images
    interval: Tango's score interval of the difference, for paired proportions (Statistics in Medicine 17, 1998)

Each end of the interval is a one-sided 95 % bound.

Statistics judge what can differ. An image cannot become right or wrong if its margin, the distance of PyTorch's logits
from the border at which it would, is larger than the runner's distance from PyTorch's logits can overcome. If this
holds for every image, and the logits are within the numeric limit of a precision that is not quantised, both
classifiers have the same accuracy, however few the images are.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.intervals import mcnemar, score_interval
from gmmvit_deploy.parity._verdict import Verdict

_MAX_IMAGES = 10**9


def nearest_to_changing(changes: NDArray[Any], margins: NDArray[Any]) -> float:
    """Return the largest change divided by its margin: below 1 if no change overcomes its margin; 0 without any."""
    shares = np.divide(changes, margins, out=np.where(changes > 0, np.inf, 0.0), where=margins > 0)
    return float(shares.max(initial=0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Numbers of images by which classifier is correct: both, only PyTorch, only the runner, neither."""

    both: int
    lost: int
    gained: int
    neither: int

    @classmethod
    def of(cls, counts: NDArray[Any]) -> Paired:
        """counts: (2, 2), the numbers of images by [PyTorch is correct, the runner is correct]."""
        (neither, gained), (lost, both) = counts.tolist()
        return cls(both=both, lost=lost, gained=gained, neither=neither)

    @property
    def images(self) -> int:
        return self.both + self.lost + self.gained + self.neither

    @property
    def pytorch_accuracy(self) -> float:
        return (self.both + self.lost) / self.images

    @property
    def runner_accuracy(self) -> float:
        return (self.both + self.gained) / self.images

    @property
    def difference(self) -> float:
        return (self.gained - self.lost) / self.images

    def interval(self) -> tuple[float, float]:
        return score_interval(self.images, self.lost, self.gained)

    def verdict(self, gate: float) -> tuple[Verdict, float]:
        """Return (the verdict on the interval of the difference, the lowest difference that passes)."""
        low, high = self.interval()
        allowed = (gate - 1) * self.pytorch_accuracy
        return "passed" if low >= allowed else "failed" if high < allowed else "undecided", allowed

    def images_needed(self, allowed: float) -> int | None:
        """Return how many images with the same shares would pass ``allowed``; None if no number up to 10⁹ would."""
        if self.difference <= allowed:
            return None
        lost, gained = self.lost / self.images, self.gained / self.images
        low, high = self.images, _MAX_IMAGES
        while low < high:
            middle = (low + high) // 2
            enough = score_interval(middle, lost * middle, gained * middle)[0] >= allowed
            low, high = (low, middle) if enough else (middle + 1, high)
        return low if low < _MAX_IMAGES else None

    def numbers(self) -> dict[str, Any]:
        """Return the shares, the difference with its interval, and McNemar's p-value, for a report."""
        return {
            "pytorch": self.pytorch_accuracy,
            "runner": self.runner_accuracy,
            "difference": self.difference,
            "interval": list(self.interval()),
            "mcnemar_p": mcnemar(self.lost, self.gained),
            **asdict(self),
        }
