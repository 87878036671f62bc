"""Compare two results A and B of ``gmmvit bench``: list which runners became faster or slower."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gmmvit_deploy.bench.report import FORMAT
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.intervals import Measured
from gmmvit_deploy.measure.statistics import ratio_of_medians


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A runner in the results A and B, for the same scenario and batch size.

    change: the time in B / in A (`ratio_of_medians`); certain if its interval excludes 1.
    """

    runner: str
    scenario: str
    batch: int
    a_ms: float
    b_ms: float
    change: Measured

    @property
    def certain(self) -> bool:
        return not self.change.low <= 1 <= self.change.high


def open_result(path: Path) -> dict[str, Any]:
    """Read a result that ``gmmvit bench --output`` wrote.  Errors: InputError when the file holds something else."""
    hint = "type gmmvit bench BUNDLE --output FILE.json to write a result"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise InputError(f"{path}: cannot be read: {exc.strerror}", hint=hint) from exc
    except ValueError as exc:
        raise InputError(f"{path}: not JSON: {exc}", hint=hint) from exc
    format_name = data.get("format") if isinstance(data, dict) else None
    if format_name != FORMAT:
        raise InputError(f"{path}: expected format {FORMAT}, got {format_name!r}", hint=hint)
    return data  # type: ignore[no-any-return]


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[list[Row], dict[str, tuple[Any, Any]]]:
    """Compare two results of `open_result` that were measured at different times.

    Returns the rows, and version or setting → (value in A, value in B) for each that differs.
    Errors: InputError with every reason why the results cannot be compared.
    """
    if against := _reasons_against(a, b):
        raise InputError(
            "A and B cannot be compared: " + "; ".join(against),
            hint="measure A and B again: type gmmvit bench with the same options, on the same machine",
        )
    cells = {_key(cell): cell for cell in b["cells"]}
    rows = [_row(cell, cells[_key(cell)]) for cell in a["cells"] if _key(cell) in cells]
    if not rows:
        raise InputError(
            "A and B cannot be compared: no runner was measured in both with the same scenario and batch size"
        )
    parts = {part: (a[part], b[part]) for part in ("versions", "bundle", "settings")}
    parts |= {
        f"runner {name}": (a["runners"][name], b["runners"][name]) for name in dict.fromkeys(r.runner for r in rows)
    }
    differing = {
        f"{part} {name}": (first.get(name), second.get(name))
        for part, (first, second) in parts.items()
        for name in sorted({*first, *second})
        if first.get(name) != second.get(name)
    }
    return rows, differing


_MUST_AGREE = {
    "the checkpoint": ("bundle", "checkpoint", "sha256"),
    "the model": ("bundle", "model"),
    "the input": ("bundle", "input"),
    "the processor": ("machine", "cpu"),
    "the cores": ("machine", "cores_allowed"),
    "the processor's features": ("machine", "features"),
    "the GPUs": ("machine", "gpus"),
    "the environment": ("machine", "environment"),
    "the data": ("data", "sha256"),
}


def _reasons_against(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    reasons = [
        f"{name} is {result['verdict']}: {result['reasons'][0]}"
        for name, result in (("A", a), ("B", b))
        if result["verdict"] != "VALID"
    ]
    for what, path in _MUST_AGREE.items():
        values = []
        for result in (a, b):
            value: Any = result
            for key in path:
                value = value.get(key)
            values.append(value)
        if values[0] != values[1]:
            reasons.append(f"{what}: {_short(values[0])} in A, {_short(values[1])} in B")
    return reasons


def _row(a: Mapping[str, Any], b: Mapping[str, Any]) -> Row:
    return Row(
        runner=a["runner"],
        scenario=a["scenario"],
        batch=a["batch"],
        a_ms=a["median_ms"],
        b_ms=b["median_ms"],
        change=ratio_of_medians(b["round_ms"], a["round_ms"]),
    )


def _key(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    return cell["runner"], cell["scenario"], cell["batch"]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}…"
