"""Make the tables of what this project gains over the best plain export, in the same runtime."""

from __future__ import annotations

from typing import Any

from benchmarks.shared.places import FAMILIES
from benchmarks.shared.results import best_straight_of, cross_of, interval, table

OURS = {"fp32": "openvino+kernels", "bf16": "openvino+kernels:bf16", "int8": "openvino+kernels:int8"}
THEIRS = {"fp32": "plain export, fp32", "bf16": "plain export, bf16", "int8": "NNCF, int8"}
PLAIN, FLOAT32, NNCF, OUR_INT8 = (
    "straight openvino",
    "ours fp32 openvino+kernels",
    "nncf_default openvino",
    "ours static openvino+kernels",
)
"""The programs of the README's table, under the names of int8_real.py."""


def headline_table(results: dict[str, Any]) -> str:
    """Return the README's table: a row for each trained network of the paper's families, in batches of 16.

    Columns: the time of the plain export in OpenVINO, the speed-up of the others, and what int8 keeps. results: name →
    result of int8_real.py; ``NAME.speed`` holds the times.
    """
    lines = []
    for family in FAMILIES:
        if family not in results or f"{family}.speed" not in results:
            continue
        times, judged = results[f"{family}.speed"]["batches"]["16"], results[family]["programs"]
        gain = {name: f"{1 / times[name]['time']['value']:.2f}×" for name in (FLOAT32, NNCF, OUR_INT8)}
        int8 = [f"{gain[name]}, keeps {judged[name]['judged']['kept']:.1%}" for name in (NNCF, OUR_INT8)]
        lines.append((family, f"{times[PLAIN]['ms']:.1f} ms", gain[FLOAT32], *int8))
    return table(("family", "plain export, float32", "ours, float32", "NNCF, int8", "ours, int8"), lines)


def gains_table(results: dict[str, Any]) -> str:
    """Return a table with a row for each of the paper's families and batch, with the intervals of the ratios."""
    lines = [
        (f"{family}, {batch}{cross_of(results[family], batch)}", *_cells(results[family][batch]))
        for family in FAMILIES
        if family in results
        for batch in ("1", "64")
    ]
    return table(("family, batch", *_head()), lines)


def _head() -> list[str]:
    return [name for precision in OURS for name in (THEIRS[precision], f"ours, {precision}", "gain")]


def _cells(rows: dict[str, Any]) -> list[str]:
    best, cells = best_straight_of(rows), []
    for precision, name in OURS.items():
        if precision in best:
            gain = interval(rows[name]["times_faster_than_best_straight"])
            cells += [_ms(rows, best[precision]), _ms(rows, name), gain]
        else:
            cells += ["", _ms(rows, name), ""]
    return cells


def _ms(rows: dict[str, Any], name: str) -> str:
    ms = rows[name]["median_ms"]
    return f"{ms:.2f} ms" if ms < 10 else f"{ms:.0f} ms"
