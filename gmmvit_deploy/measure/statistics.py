"""Statistics of measured times: ratios with an interval, percentiles that require enough queries, spreads.

    ratio     median over the rounds of (time of a program / time of another program in the same round)
    interval  [x(k+1), x(n−k)] of the n sorted ratios x(1) … x(n), with the largest k for which 2 P(X ≤ k) ≤ 5 %,
              X ~ Binomial(n, 1/2)
    spread    (75th percentile − 25th percentile of the rounds' medians) / median of the rounds' medians
    minimum number of queries for a percentile: p90 64, p99 662, p99.9 6,636

The interval is that of the sign test: it contains the true median with a confidence of 95 %, whatever the distribution
(W. R. Thompson, "On Confidence Ranges for the Median", Annals of Mathematical Statistics 7, 1936). Fewer than six
rounds have no such interval: it then spans all ratios.

The minimum numbers of queries follow from MLPerf Inference's rules on early stopping. If a single query of so many
queries is slower than a latency, the percentile lies below this latency with 99 % confidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.intervals import Measured

ENOUGH: dict[float, int] = {0.5: 8, 0.9: 64, 0.99: 662, 0.999: 6636}
"""Percentile as a share → minimum number of queries for this percentile."""
ROUNDS_OF_PROOF = 6
"""The minimum number of rounds for an interval of 95 %: 2 · (1/2)^6 < 5 % < 2 · (1/2)^5."""
_CONFIDENCE = 0.95


def ratio(above: Sequence[float] | NDArray[Any], below: Sequence[float] | NDArray[Any]) -> Measured:
    """Return the median ratio ``above`` / ``below`` of times or rates that were measured in the same rounds.

    Its interval has a confidence of 95 %, or spans all ratios if there are too few.
    Errors: ValueError when the lengths differ or are 0.
    """
    if len(above) != len(below) or not len(above):
        raise ValueError(
            f"expected the same number of rounds, at least 1, for both programs, got {len(above)} and {len(below)}"
        )
    ratios = np.asarray(above) / np.asarray(below)
    low, high = _interval(ratios, _CONFIDENCE)
    return Measured(value=float(np.median(ratios)), low=low, high=high)


def ratio_of_medians(above: Sequence[float], below: Sequence[float]) -> Measured:
    """Return median of ``above`` / median of ``below``, of rounds that were measured at different times.

    Such rounds are no pairs, so the interval divides opposite ends of the intervals of both medians. Each has the
    confidence √0.95, so both contain their medians with 95 %. This needs seven rounds of each; if there are fewer, the
    interval spans all ratios of two rounds.
    """
    (above_low, above_high), (below_low, below_high) = (
        _interval(values, math.sqrt(_CONFIDENCE)) for values in (above, below)
    )
    return Measured(
        value=float(np.median(above) / np.median(below)), low=above_low / below_high, high=above_high / below_low
    )


def nearest_rank(latencies: Sequence[float] | NDArray[Any], share: float) -> float:
    """Return a percentile by the nearest-rank method: it is one of the latencies.  share: such as 0.99."""
    return float(np.quantile(latencies, share, method="inverted_cdf"))


def percentiles(latencies_ms: NDArray[Any]) -> dict[str, dict[str, float | None]]:
    """Return name, such as ``p99.9`` → its ``ms``, None if the run has ``missing_queries`` too few for it."""
    count = len(latencies_ms)
    return {
        f"p{share * 100:g}": {
            "ms": nearest_rank(latencies_ms, share) if count >= enough else None,
            "missing_queries": max(0, enough - count),
        }
        for share, enough in ENOUGH.items()
    }


def spread(medians: Sequence[float]) -> float:
    """Return the interquartile range of the rounds' medians divided by their median."""
    low, middle, high = np.percentile(medians, [25, 50, 75])
    return float((high - low) / middle)


def _interval(values: Sequence[float] | NDArray[Any], confidence: float) -> tuple[float, float]:
    ordered, count = np.sort(values), len(values)
    outside, tail = 0, 1  # values that lie outside at each end; of the 2^count outcomes, those with so few signs
    while 2 * (tail := tail + math.comb(count, outside + 1)) / 2**count <= 1 - confidence:
        outside += 1
    return float(ordered[outside]), float(ordered[-1 - outside])
