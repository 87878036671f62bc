"""What may be said of latencies: percentiles that refuse to be quoted on too few, medians, spreads and ratios.

    a percentile p is quoted on at least n queries      p90: 64   p99: 662   p99.9: 6,636
    spread = (75 % − 25 % of the rounds' medians) / their median
    ratio  = median over rounds of (median of the one / median of the other), rounds run side by side

The smallest n are those of MLPerf's early stopping (MLPerf Inference rules, "Early stopping"): below
them no number of slow queries could be told from chance at 99 % confidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ENOUGH", "Percentile", "Ratio", "percentiles", "ratio", "spread"]

ENOUGH: dict[float, int] = {0.5: 8, 0.9: 64, 0.99: 662, 0.999: 6636}
"""Percentile → the fewest queries on which it may be quoted."""
_DRAWS = 2000
_INTERVAL = (2.5, 97.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentile:
    """value: None on too few queries; then ``missing`` says how many more it would take."""

    share: float
    value: float | None
    missing: int

    @property
    def name(self) -> str:
        """Such as ``p99.9``."""
        return f"p{self.share * 100:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A 95 % bootstrap interval around the median of the rounds' ratios."""

    median: float
    low: float
    high: float


def percentiles(latencies: NDArray[Any]) -> tuple[Percentile, ...]:
    """Of every query of a run; the nearest rank, so that each is a latency that was seen."""
    ordered = np.sort(latencies)
    found = []
    for share, enough in ENOUGH.items():
        rank = max(0, int(np.ceil(share * len(ordered))) - 1)
        quoted = float(ordered[rank]) if len(ordered) >= enough else None
        found.append(Percentile(share=share, value=quoted, missing=max(0, enough - len(ordered))))
    return tuple(found)


def spread(medians: Sequence[float]) -> float:
    """How far the rounds lie apart: their interquartile range over their median."""
    low, middle, high = np.percentile(medians, [25, 50, 75])
    return float((high - low) / middle)


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """above, below: the medians of the same rounds.  Errors: ValueError on rounds that do not match."""
    if len(above) != len(below) or not len(above):
        raise ValueError(f"{len(above)} rounds over {len(below)}: expected rounds in pairs")
    ratios = np.asarray(above) / np.asarray(below)
    drawn = np.random.default_rng(0).integers(0, len(ratios), (_DRAWS, len(ratios)))
    low, high = np.percentile(np.median(ratios[drawn], axis=1), _INTERVAL)
    return Ratio(median=float(np.median(ratios)), low=float(low), high=float(high))
