"""Make the table of classification in bulk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.shared.results import interval

__all__ = ["bulk_table"]


def bulk_table(result: Mapping[str, Any]) -> str:
    """Return a table with a row for each kind of images."""
    lines = [
        f"| images, on {result['cores']} cores | gmmvit classify --from | network alone | decoder alone | "
        "limit of both on the same cores | share of the slower | share of the limit |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        rates = [*(row["images_per_second"][program] for program in ("bulk", "runner", "decoder"))]
        cells = [f"{rate:,.0f}/s" for rate in (*rates, row["limit_per_second"])]
        shares = (interval(row["share"]), interval(row["share_of_limit"]))
        lines.append(f"| {' | '.join((name, *cells, *shares))} |")
    return "\n".join(lines)
