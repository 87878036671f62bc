"""Compare two classifiers, PyTorch and a runner, on the same images: difference of accuracy, and its interval.

    b = number of images that only PyTorch classifies correctly (lost)
    c = number of images that only the runner classifies correctly (gained)
    difference = (c − b) / n, with n the number of images
    interval: Tango's score interval of the difference, for paired proportions (Statistics in Medicine 17, 1998)

The interval is that of `gmmvit_deploy.intervals`, which also has the interval of the accuracy of one classifier.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from gmmvit_deploy.intervals import Z95_ONE_SIDED, mcnemar, score_interval
from gmmvit_deploy.parity._verdict import Verdict

_MAX_IMAGES = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Numbers of images by which classifier is correct.

    both: PyTorch and the runner are correct.  lost: only PyTorch is correct.  gained: only the runner is correct.
    neither: PyTorch and the runner are wrong.
    """

    both: int
    lost: int
    gained: int
    neither: int

    @property
    def images(self) -> int:
        return self.both + self.lost + self.gained + self.neither

    @property
    def pytorch_accuracy(self) -> float:
        """Accuracy of PyTorch, as a share of the images."""
        return (self.both + self.lost) / self.images

    @property
    def runner_accuracy(self) -> float:
        """Accuracy of the runner, as a share of the images."""
        return (self.both + self.gained) / self.images

    @property
    def difference(self) -> float:
        return (self.gained - self.lost) / self.images

    def interval(self, z: float = Z95_ONE_SIDED) -> tuple[float, float]:
        """Return both ends of the interval of `difference`.

        z: the standard normal quantile. By default, each end is a one-sided 95 % bound.
        """
        return score_interval(self.images, self.lost, self.gained, z=z)


def images_needed(pairs: Paired, gate_difference: float) -> int | None:
    """Return how many images would pass the gate if the shares of lost and gained images stayed the same.

    gate_difference: the lowest difference that passes.
    Returns None if no number of images would pass, because the measured difference is at or below ``gate_difference``,
    or if 10⁹ images would not be enough.
    """
    if pairs.difference <= gate_difference:
        return None
    lost, gained = pairs.lost / pairs.images, pairs.gained / pairs.images
    low, high = pairs.images, _MAX_IMAGES
    while low < high:
        middle = (low + high) // 2
        enough = score_interval(middle, lost * middle, gained * middle)[0] >= gate_difference
        low, high = (low, middle) if enough else (middle + 1, high)
    return low if low < _MAX_IMAGES else None


def verdict_of(pairs: Paired, gate: float) -> tuple[Verdict, float]:
    """Return (the verdict on the interval of the difference, the lowest difference that passes)."""
    low, high = pairs.interval()
    allowed = (gate - 1) * pairs.pytorch_accuracy
    return "passed" if low >= allowed else "failed" if high < allowed else "undecided", allowed


def numbers_of(pairs: Paired) -> dict[str, Any]:
    """Return the shares, the difference with its interval, and McNemar's p-value, for a report."""
    low, high = pairs.interval()
    return {
        "pytorch": pairs.pytorch_accuracy,
        "runner": pairs.runner_accuracy,
        "difference": pairs.difference,
        "interval": [low, high],
        "mcnemar_p": mcnemar(pairs.lost, pairs.gained),
        **asdict(pairs),
    }
