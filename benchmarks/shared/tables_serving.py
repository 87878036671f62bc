"""Make the tables of the results about servers on a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["hostile_table", "image_bombs_table"]

_ANSWERS = ("refused", "answered", "failed", "closed", "crash", "hang")


def hostile_table(runs: Mapping[str, dict[str, Any]]) -> str:
    """Return a table with a row for each kind of input, and below it the inputs with a wrong outcome.

    runs: target → result: ``commands``, ``direct`` (Triton and the front) or ``gateway``.
    """
    lines = [f"| target | inputs | {' | '.join(_ANSWERS)} |", "|---|---|" + "---|" * len(_ANSWERS)]
    for target, run in runs.items():
        for kind, counts in run["summary"]["kinds"].items():
            lines.append(f"| {target} | {kind} | {' | '.join(str(counts.get(a, 0)) for a in _ANSWERS)} |")
    for target, run in runs.items():
        summary, memory = run["summary"], run["memory"]
        lines += ["", f"{target}: {summary['inputs']} inputs; {_memory(memory)}"]
        for answer, names in summary["wrong"].items():
            lines += ["", f"{target}, {answer} (not right): {'; '.join(names) or 'no input'}."]
        lines += [
            "",
            f"{target}, files outside the folders of the input: {'; '.join(summary['files_outside']) or 'none'}.",
        ]
    return "\n".join(lines)


def _memory(memory: Mapping[str, Any]) -> str:
    if "after_mb" not in memory:
        return "no service was asked."
    restarts = memory.get("restarts", 0)
    since = f"since the last of {restarts} restarts" if restarts else "since the start"
    return f"memory of the service {since}: {memory['before_mb']} MB before and {memory['after_mb']} MB after."


def image_bombs_table(result: Mapping[str, Any]) -> str:
    """Return a table with a row for each kind of bomb: the other clients' latencies without and with bombs."""
    lines = [
        "| bombs | answered, refused | p50 without, with (ms) | p99 without, with (ms) | p99 with / without |",
        "|---|---|---|---|---|",
    ]
    for name, row in result["bombs"].items():
        a, b = row["without"], row["with"]
        bombs = row["bombs"]
        lines.append(
            f"| {name} | {bombs.get('answered', 0)}, {bombs.get('refused', 0)} | {a['p50_ms']:.1f}, {b['p50_ms']:.1f} "
            f"| {a['p99_ms']:.1f}, {b['p99_ms']:.1f} | {row['p99_ratio']:.2f} |"
        )
    return "\n".join(lines)
