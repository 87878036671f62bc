"""Choose the range of each projection's input from its values on real images.

A projection is a linear map that `graphs.quantize` quantises. `runtimes/programs/onnxruntime.py` runs the graph on the
images and gives the values of each input x to `Calibration`. Values outside the range of x saturate. The range is:

    extremes         the smallest and the largest x
    mean extremes    the means, over images, of the smallest and the largest x of an image
    percentile       the extremes of x without the largest 0.001 % of the magnitudes
    least error      the cut-off c of |x| with the smallest squared error E(c), summed over the histogram of |x|

    E(c) = Σ_x  (c/127)² / 12   if |x| ≤ c   (rounding)
                (|x| − c)²      if |x| > c   (saturation)

None of them is the best for all networks, so `export` tries them and judges the logits. For fp8, the steps between
values grow with the value, and the extremes are always the range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.data.images import evenly_spaced

RangeRule = Literal["extremes", "mean extremes", "percentile", "least error"]
RANGES: tuple[RangeRule, ...] = get_args(RangeRule)
_BINS = 2048
_ROWS = 2048
"""Maximum number of rows of a batch that are counted in the histogram, for time."""
_CUT_SHARE = 1e-5


class Observed:
    """What calibration measures of the input x of projections, batch by batch in bounded memory.

    lows, highs: the smallest and the largest x of each image.
    channel_lows, channel_highs: the smallest and the largest x of each channel, the last axis, (C,).
    counts: the number of elements in each bin of a histogram of |x|, from 0 to ``top``, of up to `_ROWS` evenly spaced
    rows of each batch. If an |x| exceeds the upper end, the upper end is doubled and the bins are merged in pairs.
    moments: the sum of x xᵀ over evenly spaced rows of each batch, (C, C); None if not wanted.
    """

    def __init__(self) -> None:
        self.lows: list[float] = []
        self.highs: list[float] = []
        self.channel_lows: NDArray[Any] | float = math.inf
        self.channel_highs: NDArray[Any] | float = -math.inf
        self.counts: NDArray[Any] = np.zeros(_BINS)
        self.top = 0.0
        self.moments: NDArray[Any] | None = None

    @property
    def largest(self) -> float:
        """The largest |x|."""
        return max(-min(self.lows), max(self.highs))

    @property
    def channels(self) -> NDArray[Any]:
        """The largest |x| of each channel, (C,)."""
        return np.maximum(-self.channel_lows, self.channel_highs)

    def add(self, values: NDArray[Any], *, moment_rows: int) -> None:
        """Add the values (B, …, C) of a batch, all finite.  moment_rows: max rows whose moments are added."""
        rows = values.reshape(len(values), -1, values.shape[-1])
        lows, highs = rows.min(1), rows.max(1)
        self.lows += lows.min(1).tolist()
        self.highs += highs.max(1).tolist()
        self.channel_lows = np.minimum(self.channel_lows, lows.min(0))
        self.channel_highs = np.maximum(self.channel_highs, highs.max(0))
        self._count(np.abs(_evenly(rows, _ROWS)))
        if moment_rows:
            chosen = _evenly(rows, moment_rows).astype(np.float32)
            products = chosen.T @ chosen
            self.moments = products if self.moments is None else self.moments + products

    def _count(self, magnitudes: NDArray[Any]) -> None:
        largest = float(magnitudes.max())
        self.top = self.top or max(largest, 1e-12)
        while largest > self.top:
            self.counts = np.concatenate([self.counts.reshape(-1, 2).sum(1), np.zeros(_BINS // 2)])
            self.top *= 2
        bins = np.minimum((magnitudes * (_BINS / self.top)).astype(np.int64), _BINS - 1)
        self.counts += np.bincount(bins.ravel(), minlength=_BINS)


def _evenly(rows: NDArray[Any], most: int) -> NDArray[Any]:
    """Return at most so many evenly spaced rows (N, C) of (B, tokens, C)."""
    flat = rows.reshape(-1, rows.shape[-1])
    return flat[evenly_spaced(len(flat), most)] if len(flat) > most else flat


class Calibration:
    """What calibration measures of all activations, by name.  images: the number of images."""

    def __init__(self) -> None:
        self.images = 0
        self.observed: dict[str, Observed] = {}

    def add(self, name: str, values: NDArray[Any], *, moment_rows: int = 0) -> None:
        """Add the values of a batch, as in `Observed.add`.  Errors: InputError when a value is not finite."""
        if not np.isfinite(values).all():
            raise InputError(f"calibration: tensor {name} has NaN or infinite values for these images")
        self.observed.setdefault(name, Observed()).add(values, moment_rows=moment_rows)


def ranges_of(calibration: Calibration, rule: RangeRule) -> Mapping[str, tuple[float, float]]:
    """Map the name of each activation to its range: the smallest and the largest value that do not saturate."""
    return {name: _range(observed, rule) for name, observed in calibration.observed.items()}


def extremes_of_divided(
    calibration: Calibration, factors: Mapping[str, NDArray[Any]]
) -> Mapping[str, tuple[float, float]]:
    """Return `ranges_of` with the rule ``extremes`` for activations whose channels are divided by positive factors.

    factors: name of an activation → the factor of each channel, (C,); the others are not divided.
    """
    extremes = {}
    for name, observed in calibration.observed.items():
        factor = factors.get(name, 1.0)
        low, high = np.min(observed.channel_lows / factor), np.max(observed.channel_highs / factor)
        extremes[name] = min(float(low), 0.0), max(float(high), 0.0)
    return extremes


def _range(observed: Observed, rule: RangeRule) -> tuple[float, float]:
    if rule == "mean extremes":
        low, high = float(np.mean(observed.lows)), float(np.mean(observed.highs))
    else:
        low, high = min(observed.lows), max(observed.highs)
    if rule in ("percentile", "least error"):
        cut = _percentile(observed) if rule == "percentile" else _least_error(observed)
        low, high = max(low, -cut), min(high, cut)
    return min(low, 0.0), max(high, 0.0)


def _percentile(observed: Observed) -> float:
    reached = np.searchsorted(np.cumsum(observed.counts), (1 - _CUT_SHARE) * observed.counts.sum())
    return float((reached + 1) * observed.top / _BINS)


def _least_error(observed: Observed) -> float:
    cuts = observed.largest * np.linspace(0.1, 1.0, 181)[:, None]
    values = (np.arange(_BINS) + 0.5) * (observed.top / _BINS)
    saturated = np.maximum(values - cuts, 0.0) ** 2
    errors = (saturated + (values <= cuts) * (cuts / 127) ** 2 / 12) @ observed.counts
    return float(cuts[np.argmin(errors), 0])
