"""Measure distances between logits x and reference logits r, batch by batch in constant memory.

largest = max |x − r|      p99 = 99th percentile of all |x − r|      rms = √(mean (x − r)²)
relative L2 = ‖x − r‖ / ‖r‖      cosine = smallest  x·r / (‖x‖ ‖r‖)  of all rows

A row contains the logits of an input. Every distance except cosine is computed over the logits of all rows. The logits
are not centred, except in the signal of the signal-to-noise ratio (`tolerances.signal_to_noise_db`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.tolerances import Noise

_DECADES = (-18, 6)
_BINS_A_DECADE = 100  # the 99th percentile is rounded up by at most 2.3 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Distances as defined at the head of this module; NaN if no row is finite.

    broken: the number of rows with a value that is not finite, which the distances omit.
    """

    rows: int
    broken: int
    largest: float
    p99: float
    rms: float
    relative_l2: float
    cosine: float


def distance(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """Return the largest |actual − expected|; NaN if the shapes differ or a value of ``actual`` is not finite."""
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return math.nan
    return float(np.abs(actual - expected).max())


class ErrorMeasure:
    """Accumulate distances: call ``add(actual, expected)`` for each batch, then ``errors()``."""

    def __init__(self) -> None:
        low, high = _DECADES
        self._counts = np.zeros((high - low) * _BINS_A_DECADE + 1, dtype=np.int64)
        self._rows = self._broken = self._values = 0
        self._largest = self._scale = 0.0
        self._error_squares = self._expected_squares = 0.0
        self._squares_of_means = 0.0
        self._sums: NDArray[Any] | float = 0.0
        self._cosine = 1.0

    def add(self, actual: NDArray[Any], expected: NDArray[Any]) -> None:
        """Add a batch (B, …) of x and r; the elements of each input form a row."""
        actual, expected = (np.asarray(a, np.float64).reshape(len(a), -1) for a in (actual, expected))
        self._rows += len(actual)
        whole = np.isfinite(actual).all(1)
        self._broken += int((~whole).sum())
        actual, expected = actual[whole], expected[whole]
        if not actual.size:
            return
        errors = np.abs(actual - expected)
        self._values += errors.size
        self._largest = max(self._largest, float(errors.max()))
        self._scale = max(self._scale, float(np.abs(expected).max()))
        self._error_squares += float((errors**2).sum())
        self._expected_squares += float((expected**2).sum())
        self._squares_of_means += float((expected.mean(1) ** 2).sum()) * expected.shape[1]
        self._sums = self._sums + expected.sum(0)
        norms = np.linalg.norm(actual, axis=1) * np.linalg.norm(expected, axis=1)
        cosines = np.divide((actual * expected).sum(1), norms, out=np.zeros_like(norms), where=norms > 0)
        self._cosine = min(self._cosine, float(cosines.min()))
        self._counts += np.bincount(_bins(errors), minlength=len(self._counts))

    def errors(self) -> Errors:
        values = max(self._values, 1)
        return Errors(
            rows=self._rows,
            broken=self._broken,
            largest=self._largest if self._values else math.nan,
            p99=self._percentile(0.99) if self._values else math.nan,
            rms=math.sqrt(self._error_squares / values) if self._values else math.nan,
            relative_l2=math.sqrt(self._error_squares / self._expected_squares) if self._expected_squares else math.nan,
            cosine=self._cosine if self._values else math.nan,
        )

    def db(self, *, over_images: bool) -> float:
        """Return the signal-to-noise ratio of all rows, as `tolerances.signal_to_noise_db`; NaN if no row is finite."""
        rows = self._rows - self._broken
        if not rows:
            return math.nan
        means = float((np.square(self._sums) / rows).sum()) if over_images else self._squares_of_means
        signal = self._expected_squares - means
        if signal <= 1e-12 * self._expected_squares:  # equal logits, and the rounding of their sums
            return 0.0
        return 10 * math.log10(signal / max(self._error_squares, signal * 1e-20))

    def noise(self) -> Noise:
        """Return the distances of PyTorch's float32 logits from its float64 logits as noise (module `tolerances`)."""
        errors = self.errors()
        return Noise(largest=errors.largest, rms=errors.rms, scale=self._scale)

    def _percentile(self, share: float) -> float:
        reached = int(np.searchsorted(np.cumsum(self._counts), math.ceil(share * self._values)))
        if reached == 0:
            return 0.0  # the first bin counts exact zeros
        upper = 10 ** (_DECADES[0] + reached / _BINS_A_DECADE)
        return min(float(upper) * (1 + 1e-9), self._largest)  # the bin's edge itself is rounded


def _bins(errors: NDArray[Any]) -> NDArray[Any]:
    low, high = _DECADES
    with np.errstate(divide="ignore"):
        position = np.ceil((np.log10(errors) - low) * _BINS_A_DECADE)
    clipped: NDArray[Any] = np.clip(position, 1, (high - low) * _BINS_A_DECADE)
    return np.where(errors > 0, clipped, 0).astype(np.int64).reshape(-1)
