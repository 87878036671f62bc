"""Statistics of latencies: percentiles that require enough queries, medians, spreads and ratios.

    a percentile p is quoted on at least n queries      p90: 64   p99: 662   p99.9: 6,636
    spread = (75 % − 25 % of the rounds' medians) / their median
    ratio  = median over rounds of (median of the runner / median of the baseline), rounds run side by side

The minimum n follow from MLPerf's early stopping (MLPerf Inference rules, "Early stopping"): with fewer queries no
number of slow queries differs from chance at 99 % confidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ENOUGH", "Percentile", "Ratio", "percentiles", "ratio", "spread"]

ENOUGH: dict[float, int] = {0.5: 8, 0.9: 64, 0.99: 662, 0.999: 6636}
"""Percentile, as a share → minimum number of queries to quote it."""
_DRAWS = 2000
_INTERVAL = (2.5, 97.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentile:
    """A percentile.  value: None with too few queries.  missing: how many more queries are needed."""

    share: float
    value: float | None
    missing: int

    @property
    def name(self) -> str:
        """Name of the percentile, such as ``p99.9``."""
        return f"p{self.share * 100:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The median of the rounds' ratios with its 95 % bootstrap interval."""

    median: float
    low: float
    high: float


def percentiles(latencies: NDArray[Any]) -> tuple[Percentile, ...]:
    """Return the percentiles of a run's latencies by nearest rank, so that each value is a measured latency."""
    ordered = np.sort(latencies)
    quantiles = []
    for share, enough in ENOUGH.items():
        rank = max(0, int(np.ceil(share * len(ordered))) - 1)
        quoted = float(ordered[rank]) if len(ordered) >= enough else None
        quantiles.append(Percentile(share=share, value=quoted, missing=max(0, enough - len(ordered))))
    return tuple(quantiles)


def spread(medians: Sequence[float]) -> float:
    """Return the interquartile range of the rounds' medians, divided by their median."""
    low, middle, high = np.percentile(medians, [25, 50, 75])
    return float((high - low) / middle)


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Return the ratio ``above`` / ``below`` with its interval.

    above, below: medians of the same rounds.  Errors: ValueError on different numbers of rounds, or no round.
    """
    if len(above) != len(below) or not len(above):
        raise ValueError(f"{len(above)} rounds over {len(below)}: expected rounds in pairs")
    ratios = np.asarray(above) / np.asarray(below)
    drawn = np.random.default_rng(0).integers(0, len(ratios), (_DRAWS, len(ratios)))
    low, high = np.percentile(np.median(ratios[drawn], axis=1), _INTERVAL)
    return Ratio(median=float(np.median(ratios)), low=float(low), high=float(high))
