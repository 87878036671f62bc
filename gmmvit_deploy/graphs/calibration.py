"""Choose the quantisation range of each projection's input from the magnitudes of this input on real images.

A projection is a linear map that `graphs.quantize` quantises. `runtimes/programs/onnxruntime.py` runs the graph
on the images and fills a histogram of |x| for each input x. The bound of x is the magnitude that becomes the largest
quantised value; larger magnitudes saturate.

For fp8 the bound is the largest |x|, because the steps between fp8 values grow with the value. For int8 all steps are
equal, so a single large |x| would make every step coarser. The int8 bound is therefore the cut-off c with the smallest
squared error E(c), summed over the histogram:

    E(c) = Σ_x  (c/127)² / 12   if |x| ≤ c   (rounding)
                (|x| − c)²      if |x| > c   (saturation)

For fp8 the rounding term of E(c) is (x/8)² / 12, because fp8 (E4M3) has three mantissa bits. For fp8, only
`excess_errors` uses E(c).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.graphs.quantize import grid_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gmmvit_deploy.precision import Precision

__all__ = ["Histograms", "bounds_of", "excess_errors"]

_BINS = 2048


class Histograms:
    """A histogram of |x| for each tensor, filled batch by batch in bounded memory.

    images: the number of images.
    counts: name of a tensor → the number of elements in each bin of the tensor's histogram.
    largest: name of a tensor → the largest |x| of the tensor.
    top: name of a tensor → the upper end of the tensor's histogram; the lower end is 0. If an |x| exceeds the upper
    end, the upper end is doubled and the bins are merged in pairs.
    """

    def __init__(self) -> None:
        self.images = 0
        self.counts: dict[str, NDArray[Any]] = {}
        self.top: dict[str, float] = {}
        self.largest: dict[str, float] = {}

    def add(self, name: str, values: NDArray[Any]) -> None:
        """Add the elements of a batch to the histogram of the tensor ``name``.

        Errors: InputError when an element is not finite.
        """
        import numpy as np

        magnitudes = np.abs(values).ravel()
        largest = float(magnitudes.max(initial=0.0))
        if not np.isfinite(largest):
            raise InputError(f"calibration: tensor {name} has NaN or infinite values for these images")
        counts = self.counts.setdefault(name, np.zeros(_BINS))
        top = self.top.setdefault(name, max(largest, 1e-12))
        while largest > top:
            counts[:] = np.concatenate([counts.reshape(-1, 2).sum(1), np.zeros(_BINS // 2)])
            top *= 2
        self.top[name] = top
        self.largest[name] = max(largest, self.largest.get(name, 0.0))
        counts += np.histogram(magnitudes, bins=_BINS, range=(0.0, top))[0]


def bounds_of(histograms: Histograms, precision: Precision) -> Mapping[str, float]:
    """Map the name of each tensor to the tensor's bound: the magnitude that becomes the largest quantised value."""
    if precision == "fp8":
        return dict(histograms.largest)
    return {
        name: _least_error(counts, histograms.top[name], histograms.largest[name])
        for name, counts in histograms.counts.items()
    }


def excess_errors(histograms: Histograms, bounds: Mapping[str, float], precision: Precision) -> dict[str, float]:
    """Return, for each tensor, a ratio of two rms quantisation errors on ``histograms``.

    The first error is that with the given ``bounds``; it is divided by the error with the bounds that `bounds_of`
    computes from ``histograms``. The ratio is about 1 if ``bounds`` were calibrated on
    images similar to the images of ``histograms``, and several times larger if not.
    """
    own = bounds_of(histograms, precision)
    excess = {}
    for name, counts in histograms.counts.items():
        given, best = _squared_errors(counts, histograms.top[name], [bounds[name], own[name]], precision)
        excess[name] = float((given / best) ** 0.5) if best > 0 else 1.0
    return excess


def _least_error(counts: NDArray[Any], top: float, largest: float) -> float:
    import numpy as np

    cuts = largest * np.linspace(0.3, 1.0, 141)
    return float(cuts[np.argmin(_squared_errors(counts, top, cuts, "int8"))])


def _squared_errors(
    counts: NDArray[Any], top: float, cuts: NDArray[Any] | list[float], precision: Precision
) -> NDArray[Any]:
    """Return the squared error E(c), summed over the histogram, for each cut-off c in ``cuts``.

    counts: the number of elements in each bin of the histogram.  top: the upper end of the histogram.
    """
    import numpy as np

    values, bounds = (np.arange(_BINS) + 0.5) * (top / _BINS), np.asarray(cuts)[:, None]
    beyond = np.maximum(values - bounds, 0.0) ** 2
    step = values / 8 if precision == "fp8" else bounds / grid_of("int8").largest
    errors: NDArray[Any] = (beyond + (values <= bounds) * step**2 / 12) @ counts
    return errors
