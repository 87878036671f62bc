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

from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.errors import InputError

RangeRule = Literal["extremes", "mean extremes", "percentile", "least error"]
RANGES: tuple[RangeRule, ...] = get_args(RangeRule)
_BINS = 2048
_ROWS = 2048
"""Maximum number of rows of a batch from which the second moments are computed, for time."""
_CUT_SHARE = 1e-5


class Observed:
    """What calibration measures of the input x of projections, batch by batch in bounded memory.

    lows, highs: the smallest and the largest x of each image.
    counts: the number of elements in each bin of a histogram of |x|, from 0 to ``top``. If an |x| exceeds the upper
    end, the upper end is doubled and the bins are merged in pairs.
    channels: the largest |x| of each channel, the last axis, (C,).
    moments: the sum of x xᵀ over rows of up to `_ROWS` evenly spaced rows of each batch, (C, C); None if not wanted.
    """

    def __init__(self) -> None:
        self.lows: list[float] = []
        self.highs: list[float] = []
        self.counts: NDArray[Any] = np.zeros(_BINS)
        self.top = 0.0
        self.channels: NDArray[Any] = np.zeros(0)
        self.moments: NDArray[Any] | None = None

    @property
    def largest(self) -> float:
        """The largest |x|."""
        return max(-min(self.lows), max(self.highs))

    def add(self, values: NDArray[Any], *, moments: bool) -> None:
        """Add the values (B, …, C) of a batch, all finite.  moments: True to add to ``moments``."""
        by_image = values.reshape(len(values), -1)
        self.lows += by_image.min(1).tolist()
        self.highs += by_image.max(1).tolist()
        rows = values.reshape(-1, values.shape[-1])
        magnitudes = np.abs(rows)
        largest = magnitudes.max(0)
        self.channels = np.maximum(self.channels, largest) if len(self.channels) else largest
        self.top = self.top or max(float(largest.max()), 1e-12)
        while largest.max() > self.top:
            self.counts = np.concatenate([self.counts.reshape(-1, 2).sum(1), np.zeros(_BINS // 2)])
            self.top *= 2
        self.counts += np.histogram(magnitudes, bins=_BINS, range=(0.0, self.top))[0]
        if moments:
            chosen = rows[:: -(-len(rows) // _ROWS)].astype(np.float32)
            products = chosen.T @ chosen
            self.moments = products if self.moments is None else self.moments + products


class Calibration:
    """What calibration measures of all activations, by name.  images: the number of images."""

    def __init__(self) -> None:
        self.images = 0
        self.observed: dict[str, Observed] = {}

    def add(self, name: str, values: NDArray[Any], *, moments: bool = False) -> None:
        """Add the values of a batch, as in `Observed.add`.  Errors: InputError when a value is not finite."""
        if not np.isfinite(values).all():
            raise InputError(f"calibration: tensor {name} has NaN or infinite values for these images")
        self.observed.setdefault(name, Observed()).add(values, moments=moments)


def ranges_of(calibration: Calibration, rule: RangeRule) -> Mapping[str, tuple[float, float]]:
    """Map the name of each activation to its range: the smallest and the largest value that do not saturate."""
    return {name: _range(observed, rule) for name, observed in calibration.observed.items()}


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
