"""Make the tables of the long runs of a service: rollouts under load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["rollout_table"]


def rollout_table(result: Mapping[str, Any]) -> str:
    """Return a sentence on the requests, and a table with a row for each rollout."""
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(result["by_kind"].items()))
    lines = [
        f"{result['requests']:,} requests ({kinds}) at {result['requests_per_second']:.0f}/s; the clients reach "
        f"{result['capacity_per_second']:.0f}/s in closed loop. Lost: {result['lost']}. Wrong: {result['wrong']}.",
        "",
        "| rollout | bundle | expected | outcome | time | requests meanwhile | answers of the new bundle |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, row in enumerate(result["rollouts"], start=1):
        cells = (str(number), row["bundle"], row["expected"], row["outcome"], f"{row['seconds']:.1f} s")
        answers = row["answers"].get(row["bundle"], 0)
        lines.append(f"| {' | '.join(cells)} | {row['requests']:,} | {answers:,} |")
    return "\n".join(lines)
