"""How large the inputs of each projection are on real images, and where to cut them off.

`runtime/graph_calibration.py` runs the graph and fills the histograms.

For fp8 the largest value seen is the bound: its steps grow with the value. For int8 all steps are
equal, so one outlier would waste them; the bound c is the one with the least expected error

    E(c) = Σ_x  c² / (12·127²)  for |x| ≤ c,   (|x| − c)²  beyond

over a histogram of |x|. For fp8 the first term is (x/8)² / 12: three bits behind the first.
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
    """|x| of several tensors, batch after batch, in bounded memory.

    A histogram covers 0 to ``top``; a value beyond doubles ``top`` and merges bins two by two.
    """

    def __init__(self) -> None:
        self.images = 0
        self.counts: dict[str, NDArray[Any]] = {}
        self.top: dict[str, float] = {}
        self.largest: dict[str, float] = {}

    def add(self, name: str, values: NDArray[Any]) -> None:
        """Errors: InputError when a value is not finite."""
        import numpy as np

        magnitudes = np.abs(values).ravel()
        largest = float(magnitudes.max(initial=0.0))
        if not np.isfinite(largest):
            raise InputError(f"calibration: {name} is not finite on these images")
        counts = self.counts.setdefault(name, np.zeros(_BINS))
        top = self.top.setdefault(name, max(largest, 1e-12))
        while largest > top:
            counts[:] = np.concatenate([counts.reshape(-1, 2).sum(1), np.zeros(_BINS // 2)])
            top *= 2
        self.top[name] = top
        self.largest[name] = max(largest, self.largest.get(name, 0.0))
        counts += np.histogram(magnitudes, bins=_BINS, range=(0.0, top))[0]


def bounds_of(found: Histograms, precision: Precision) -> Mapping[str, float]:
    """Tensor → the value that becomes the last on the grid."""
    if precision == "fp8":
        return dict(found.largest)
    return {name: _least_error(counts, found.top[name], found.largest[name]) for name, counts in found.counts.items()}


def excess_errors(found: Histograms, bounds: Mapping[str, float], precision: Precision) -> dict[str, float]:
    """Tensor → rms error on ``found`` with the given bound, over that with the bound ``found`` itself would give.

    1 where the bounds were made of such images; many times that where they were made of others.
    """
    own = bounds_of(found, precision)
    excess = {}
    for name, counts in found.counts.items():
        given, best = _squared_errors(counts, found.top[name], [bounds[name], own[name]], precision)
        excess[name] = float((given / best) ** 0.5) if best > 0 else 1.0
    return excess


def _least_error(counts: NDArray[Any], top: float, largest: float) -> float:
    import numpy as np

    cuts = largest * np.linspace(0.3, 1.0, 141)
    return float(cuts[np.argmin(_squared_errors(counts, top, cuts, "int8"))])


def _squared_errors(
    counts: NDArray[Any], top: float, cuts: NDArray[Any] | list[float], precision: Precision
) -> NDArray[Any]:
    """E(c) of each cut."""
    import numpy as np

    values, bounds = (np.arange(_BINS) + 0.5) * (top / _BINS), np.asarray(cuts)[:, None]
    beyond = np.maximum(values - bounds, 0.0) ** 2
    step = values / 8 if precision == "fp8" else bounds / grid_of("int8").largest
    errors: NDArray[Any] = (beyond + (values <= bounds) * step**2 / 12) @ counts
    return errors
