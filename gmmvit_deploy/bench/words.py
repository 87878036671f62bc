"""Format parts of a result as text, for the page and the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gmmvit_deploy.bench.statistics import Ratio

__all__ = ["percentile_words", "ratio_words", "roofline_words"]


def percentile_words(cell: Mapping[str, Any], name: str) -> str:
    """Format a percentile of a cell: the latency in milliseconds, or the number of queries that are missing for it.

    cell: the JSON of a `measure.Cell`.  name: the name of the percentile, such as ``p99``.
    """
    percentile = cell["percentiles"].get(name)
    if percentile is None:
        return ""
    if percentile["ms"] is None:
        return f"{percentile['missing_queries']:,} queries short"
    return f"{percentile['ms']:.3f}"


def roofline_words(line: Mapping[str, Any]) -> str:
    """Format a roofline: precision, device, highest rate, library and shape of this rate, and bandwidth."""
    shape = "×".join(map(str, line["shape"]))
    return (
        f"{line['precision']} on the {line['device']}: {line['gflops']:.0f} GFLOP/s ({line['library']}, {shape}), "
        f"{line['bandwidth_gb_s']:.0f} GB/s"
    )


def ratio_words(ratio: Ratio, digits: int = 3) -> str:
    """Format a ratio: the median and the interval, such as ``1.012 (1.004–1.019)``."""
    return f"{ratio.median:.{digits}f} ({ratio.low:.{digits}f}–{ratio.high:.{digits}f})"
