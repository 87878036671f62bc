"""Make the tables of the gateway: overload and cost."""

from __future__ import annotations

from typing import Any

from benchmarks.shared.results import interval

__all__ = ["gateway_cost_table", "overload_table"]

_PLACES = {"direct": "Triton directly", "gateway": "through the gateway"}


def overload_table(results: dict[str, Any]) -> str:
    """Return a table with a row for each protocol, directly and through the gateway."""
    lines = [
        "| protocol | capacity | clients send to | answered in time | slowest refusal | clients that gave up | "
        "recovered after |",
        "|---|---|---|---|---|---|---|",
    ]
    for protocol in ("grpc", "http"):
        capacity = results[protocol]["direct"]["capacity_per_second"]
        for place, words in _PLACES.items():
            row = results[protocol][place]
            over = row["overload"]
            refused = f"{over['slowest_refusal_ms']:.0f} ms" if over["slowest_refusal_ms"] else "none refused"
            share = over["answered_per_second"] / capacity
            cells = (
                protocol,
                f"{capacity:.0f}/s",
                words,
                f"{over['answered_per_second']:.1f}/s, {share:.0%} of the capacity",
                refused,
                f"{over['statuses'].get('DEADLINE', 0) / over['requests']:.0%}",
                f"{row['recovered_s']:.2f} s",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def gateway_cost_table(results: dict[str, Any]) -> str:
    """Return a table with a row for each protocol and number of clients."""
    lines = [
        "| protocol, clients | directly | through the gateway | share of the throughput | cost of a request |",
        "|---|---|---|---|---|",
    ]
    for name, row in results["rows"].items():
        rate = row["requests_per_second"]
        cells = (
            name.replace(" 1 clients", " 1 client"),
            f"{rate['direct']:,.0f}/s",
            f"{rate['gateway']:,.0f}/s",
            interval(row["share"]),
            f"{row['cost_ms']['median']:.2f} ms",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
