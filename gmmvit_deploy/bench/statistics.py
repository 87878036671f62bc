"""Statistics of latencies: percentiles that require enough queries, medians, spreads and ratios.

    minimum number of queries for a percentile: p90 64, p99 662, p99.9 6,636
    spread = (75th percentile − 25th percentile of the rounds' medians) / median of the rounds' medians
    ratio  = median over the rounds of (median of the runner / median of the baseline in the same round)

The minimum numbers follow from MLPerf Inference's rules on early stopping. If a single query of so many queries is
slower than a latency, the percentile lies below this latency with 99 % confidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ENOUGH", "Percentile", "Ratio", "percentiles", "ratio", "spread"]

ENOUGH: dict[float, int] = {0.5: 8, 0.9: 64, 0.99: 662, 0.999: 6636}
"""Percentile as a share → minimum number of queries for this percentile."""
_DRAWS = 2000
_INTERVAL = (2.5, 97.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentile:
    """A percentile of latencies.

    share: the percentile as a share, such as 0.99.
    value: the latency, in the unit of the latencies; None if there are too few queries.
    missing: the number of additional queries that a value needs; 0 if there is a value.
    """

    share: float
    value: float | None
    missing: int

    @property
    def name(self) -> str:
        """The name of the percentile, such as ``p99.9``."""
        return f"p{self.share * 100:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The median of the rounds' ratios.  low, high: the 95 % bootstrap interval of the median."""

    median: float
    low: float
    high: float


def percentiles(latencies: NDArray[Any]) -> tuple[Percentile, ...]:
    """Return the percentiles of a run's latencies.  By the nearest-rank method, each value is a measured latency."""
    ordered = np.sort(latencies)
    quantiles = []
    for share, enough in ENOUGH.items():
        rank = max(0, int(np.ceil(share * len(ordered))) - 1)
        quoted = float(ordered[rank]) if len(ordered) >= enough else None
        quantiles.append(Percentile(share=share, value=quoted, missing=max(0, enough - len(ordered))))
    return tuple(quantiles)


def spread(medians: Sequence[float]) -> float:
    """Return the interquartile range of ``medians`` divided by the median of ``medians``.

    medians: the median latency of each round.
    """
    low, middle, high = np.percentile(medians, [25, 50, 75])
    return float((high - low) / middle)


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Return the ratio ``above`` / ``below`` with its interval.

    above, below: the medians of two programs in the same rounds.
    Errors: ValueError when ``above`` and ``below`` have different lengths, or are empty.
    """
    if len(above) != len(below) or not len(above):
        raise ValueError(
            f"expected the same number of rounds, at least 1, for both programs, got {len(above)} and {len(below)}"
        )
    ratios = np.asarray(above) / np.asarray(below)
    drawn = np.random.default_rng(0).integers(0, len(ratios), (_DRAWS, len(ratios)))
    low, high = np.percentile(np.median(ratios[drawn], axis=1), _INTERVAL)
    return Ratio(median=float(np.median(ratios)), low=float(low), high=float(high))
