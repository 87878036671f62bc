"""Read the results of the scripts, for the tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.shared.places import RESULTS
from benchmarks.shared.systems import MEASURED
from gmmvit_deploy.intervals import Measured


def result(script: str) -> dict[str, Any]:
    """Read the result of a script such as ``served``."""
    content: dict[str, Any] = json.loads((RESULTS / f"{script}.json").read_text(encoding="utf-8"))
    return content


def by_family(script: str) -> dict[str, dict[str, Any]]:
    """Return name → result, for a script that measures each family or system separately; the paper's families first."""
    written = {path.stem for path in (RESULTS / script).glob("*.json")}
    return {name: result(f"{script}/{name}") for name in MEASURED if name in written}


def by_run(script: str) -> dict[str, dict[str, Any]]:
    """Return name of the result file without suffix → result, for a script with several runs."""
    return {path.stem: result(f"{script}/{path.stem}") for path in sorted((RESULTS / script).glob("*.json"))}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    return "\n".join([_line(head), "|---" * len(head) + "|", *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def interval(ratio: Measured | Mapping[str, float], digits: int = 2) -> str:
    """Format a ratio such as ``1.01 (1.00–1.02)``: the ratio and its interval."""
    values = asdict(ratio) if isinstance(ratio, Measured) else ratio
    return f"{values['value']:.{digits}f} ({values['low']:.{digits}f}–{values['high']:.{digits}f})"


def row_of(rows: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the row of a runner.  If our kernels compute no part of the model, return the row without kernels."""
    row: dict[str, Any] | None = rows.get(name, rows.get(name.replace("+kernels", "")))
    return row


def best_straight_of(rows: Mapping[str, Any]) -> dict[str, str]:
    """Return precision → name of the best straight program, with which the rows of our programs are compared."""
    return {row["precision"]: row["best_straight"] for row in rows.values() if "best_straight" in row}


def cross_of(measured: Mapping[str, Any], batch: str) -> str:
    """Return `` †`` if a result is INVALID for a reason that names this batch or no batch, else ""."""
    card = measured.get("card", {})
    if card.get("verdict", "VALID") == "VALID":
        return ""
    batches = [reason.partition(": ")[2].partition(",")[0] for reason in card["reasons"]]
    return " †" if any(named == batch or not named.isdigit() for named in batches) else ""


def card_lines(card: dict[str, Any]) -> list[str]:
    """Return a run card as lines of Markdown."""
    # Older cards keep Python's version outside ``versions``.
    tools = {"python": card["python"], **card["versions"]} if "python" in card else card["versions"]
    versions = ", ".join(f"{name} {version}" for name, version in tools.items() if version != "not installed")
    settings = ", ".join(f"{name} {value}" for name, value in card["settings"].items())
    features = f" ({', '.join(card['features'])})" if card.get("features") else ""
    lines = []
    if "verdict" in card:  # missing in older results
        lines += [f"**{card['verdict']}**", "", *(f"- {reason}" for reason in card["reasons"]), ""]
    lines.append(
        f"{settings}. {card['cores']} cores of {card['cpu']}{features}, load {card['load_before']:.1f} before and "
        f"{card['load_after']:.1f} after, {card['seconds']:.0f} s; {versions}."
    )
    return lines
