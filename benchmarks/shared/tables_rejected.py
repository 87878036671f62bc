"""Make the tables of the ideas that were measured and rejected."""

from __future__ import annotations

from typing import Any

from benchmarks.shared.results import interval, result

__all__ = ["SHOWN", "documented_tables", "page_tables"]

SHOWN = {
    "low_rank": ("low_rank",),
    "layouts": ("layouts",),
    "shared_memory": ("shared_memory",),
    "rotation_as_rows": ("rotation_as_rows",),
    "shifted_patches_as_convolution": ("shifted_patches_as_convolution",),
}
"""Script → markers of the script's tables on the page of results."""


def documented_tables() -> dict[str, str]:
    """Return name of a marker in the documentation → the table at this marker."""
    return {
        "low_rank": ranks_table(result("rejected/low_rank")),
        "rotation_as_rows": forms_table(result("rejected/rotation_as_rows")),
        "shifted_patches_as_convolution": forms_table(result("rejected/shifted_patches_as_convolution")),
    }


def page_tables() -> dict[str, str]:
    """Return name of a marker → table, for the tables that only the page of results shows."""
    return {
        "layouts": layouts_table(result("rejected/layouts")),
        "shared_memory": shared_memory_table(result("rejected/shared_memory")),
    }


def ranks_table(results: dict[str, Any]) -> str:
    """Return two tables: the ranks of each family's masks, and the time of fused attention for each rank."""
    lines = [
        "| family | tokens | rank: minimum, median, maximum | rank with cut-off 1e-3: minimum, median, maximum |",
        "|---|---|---|---|",
    ]
    for family, row in results["ranks"].items():
        tokens, exact, coarse = (", ".join(map(str, row[key])) for key in ("tokens", "exact", "coarse"))
        lines.append(f"| {family} | {tokens.replace(', ', ' to ')} | {exact} | {coarse} |")
    lines += ["", "| rank R | time of fused attention / time of separate operators |", "|---|---|"]
    lines += [f"| {rank} | {interval(ratio)} |" for rank, ratio in results["fused_over_masked"].items()]
    return "\n".join(lines)


def layouts_table(results: dict[str, Any]) -> str:
    """Return a table with a row for each family and batch: time with channels first / time of the exported graph."""
    lines = ["| family, batch | with a mask: other layout / export | plain: other layout / export |", "|---|---|---|"]
    for family, by_batch in results["families"].items():
        for batch in (key for key in ("1", "64") if key in by_batch):
            cells = [interval(by_batch[batch][key]) for key in ("gmm", "plain")]
            lines.append(f"| {family}, {batch} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shared_memory_table(results: dict[str, Any]) -> str:
    """Return a table with a row for each protocol and batch: time with shared memory / time with messages."""
    lines = ["| protocol, batch | messages, ms | shared memory / messages |", "|---|---|---|"]
    for protocol in ("grpc", "http"):
        for batch, row in results[protocol].items():
            ratio = interval(row["shared_over_messages"], 3)
            lines.append(f"| {protocol}, {batch} | {row['messages_ms']:.2f} | {ratio} |")
    return "\n".join(lines)


def forms_table(results: dict[str, Any]) -> str:
    """Return a table with a row for each system, batch and runner: time of each form / time of the exported graph."""
    systems = results["systems"]
    forms = list(next(iter(systems.values()))["float64_difference"])
    lines = [
        f"| system, batch | runner | exported, ms | {' | '.join(f'{form} / exported' for form in forms)} |",
        f"|---|---|---|{'---|' * len(forms)}",
    ]
    for system, by_batch in systems.items():
        for batch in (key for key in ("1", "64") if key in by_batch):
            for runner, row in by_batch[batch].items():
                cells = [interval(row["forms"][form]["over_exported"]) for form in forms]
                lines.append(f"| {system}, {batch} | {runner} | {row['exported_ms']:.2f} | {' | '.join(cells)} |")
    sizes = "; ".join(f"{system}: {row['size']}" for system, row in systems.items())
    return "\n".join([*lines, "", f"Sizes: {sizes}."])
