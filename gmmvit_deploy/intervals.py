"""Intervals and a test of shares that are measured on images.

    share of images with a property          Wilson's score interval (J. Am. Stat. Assoc. 22, 1927); where a choice
                                             rests on it, Clopper and Pearson's exact bound (Biometrika 26, 1934)
    difference of two shares, same images    Tango's score interval for paired proportions (Statistics in Medicine 17,
                                             1998)
    McNemar's exact test                     if two classifiers are right equally often, the number of images that only
                                             the first has right follows a binomial distribution with p = 1/2 over the
                                             images that one of them has right

Neither interval has zero width. If no prediction changed on n images, each end of Tango's interval is z² / (n + z²)
from 0, with z the normal quantile of the confidence level: n images cannot exclude a smaller difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Z95_ONE_SIDED = 1.6448536269514722
_ONE_SIDED = 0.05
_STEPS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A measured share or ratio, with both ends of its interval."""

    value: float
    low: float
    high: float


def score_interval(images: float, lost: float, gained: float, *, z: float = Z95_ONE_SIDED) -> tuple[float, float]:
    """Return both ends of Tango's score interval of (gained − lost) / images.  z: the standard normal quantile."""
    point = (gained - lost) / images

    def statistic(difference: float) -> float:
        # Maximum-likelihood estimate of the share of lost images, restricted to the given difference.
        linear = -gained - lost + (2 * images - gained + lost) * difference
        constant = -lost * difference * (1 - difference)
        root = math.sqrt(max(linear**2 - 8 * images * constant, 0.0))
        share = (root - linear) / (4 * images)
        variance = images * (2 * share + difference * (1 - difference))
        distance = gained - lost - images * difference
        return distance / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, distance)

    low = _crossing(lambda d: statistic(d) > z, -1.0, point)
    high = _crossing(lambda d: statistic(d) >= -z, point, 1.0)
    return low, high


def _crossing(above: Callable[[float], bool], low: float, high: float) -> float:
    """Return, by bisection, the point where ``above`` changes from True, at ``low``, to False, at ``high``."""
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if above(middle) else (low, middle)
    return (low + high) / 2


def share_interval(right: float, images: int, *, z: float = Z95_ONE_SIDED) -> tuple[float, float]:
    """Return both ends of Wilson's score interval of a binomial share.  z: the standard normal quantile."""
    share, weight = right / images, z**2 / images
    centre = (share + weight / 2) / (1 + weight)
    half = math.sqrt(weight * (share * (1 - share) + weight / 4)) / (1 + weight)
    return min(share, centre - half), min(max(share, centre + half), 1.0)  # the limits act on rounding only


def exact_lower_bound(right: int, images: int) -> float:
    """Return Clopper and Pearson's one-sided 95 % bound of a binomial share (Biometrika 26, 1934)."""
    wrong = images - right
    if not right:
        return 0.0

    def unlikely(share: float) -> bool:
        """Whether so few wrong images have a probability below 5 %."""
        terms = (
            math.lgamma(images + 1)
            - math.lgamma(k + 1)
            - math.lgamma(images - k + 1)
            + k * math.log1p(-share)
            + (images - k) * math.log(share)
            for k in range(wrong + 1)
        )
        return sum(map(math.exp, terms)) < _ONE_SIDED

    return _crossing(unlikely, 0.0, 1.0)


def mcnemar(lost: int, gained: int, *, tries: int = 1) -> float:
    """Return the two-sided exact p-value of McNemar's test; 1 if no prediction changed.

    tries: the number of comparisons of which this is one; the p-value is multiplied by it (Bonferroni's correction).
    """
    total, fewer = lost + gained, min(lost, gained)
    ways = tail = 1  # ways to choose 0 of all, then 1, 2, …
    for k in range(fewer):
        ways = ways * (total - k) // (k + 1)
        tail += ways
    tail *= 2 * tries
    return tail / 2**total if tail < 2**total else 1.0  # a quotient of whole numbers: 2**1024 is no float
