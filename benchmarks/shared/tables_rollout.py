"""Make the tables of the long runs of a service: rollouts under load, and the growth of memory and descriptors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["rollout_table", "soak_table"]


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


def soak_table(result: Mapping[str, Any]) -> str:
    """Return a sentence on the requests, and a table with a row for each kind of process."""
    sent = sum(result["requests"].values())
    lines = [
        f"{sent:,} requests, measured for {result['measured_s'] / 60:.0f} minutes after a warm-up of "
        f"{result['warm_up_s'] / 60:.1f} minutes. Lost: {result['lost']}. Wrong: {result['wrong']}. With another "
        f"status than expected: {result['unexpected']}.",
        "",
        "| processes | memory, MiB | growth of the memory (limit) | descriptors | growth of the descriptors (limit) |",
        "|---|---|---|---|---|",
    ]
    for kind, quantities in result["growth"].items():
        cells = [kind]
        for name in ("memory_mib", "descriptors"):
            row = quantities[name]
            cells += [
                f"{row['mean']:.1f}",
                f"{row['growth']:+.2f} ({row['low']:+.2f} to {row['high']:+.2f}; {row['limit']:.1f})",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
