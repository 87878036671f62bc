"""How a result's parts are put into words, on the page as in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gmmvit_deploy.bench.statistics import Ratio

__all__ = ["percentile_words", "ratio_words", "roofline_words"]


def percentile_words(cell: Mapping[str, Any], name: str) -> str:
    """Of a cell of the result, such as p99: its milliseconds, or how many queries are missing."""
    percentile = cell["percentiles"].get(name)
    if percentile is None:
        return ""
    return f"{percentile['ms']:.3f}" if percentile["ms"] is not None else f"{percentile['missing_queries']:,} too few"


def roofline_words(line: Mapping[str, Any]) -> str:
    """Precision and device, the best rate with who reached it on what shape, and the bandwidth."""
    shape = "×".join(map(str, line["shape"]))
    return (
        f"{line['precision']} on the {line['device']}: {line['gflops']:.0f} GFLOP/s ({line['library']}, {shape}), "
        f"{line['bandwidth_gb_s']:.0f} GB/s"
    )


def ratio_words(ratio: Ratio, digits: int = 3) -> str:
    """Such as ``1.012 (1.004–1.019)``: the median with its interval."""
    return f"{ratio.median:.{digits}f} ({ratio.low:.{digits}f}–{ratio.high:.{digits}f})"
