"""Make the tables of costs on the pages of the systems with another attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.shared.results import best_straight_of, cross_of, interval, row_of, table
from benchmarks.shared.systems import LSA_FAMILIES, SYSTEMS

__all__ = ["COSTS", "cost_table", "cost_tables", "masked_attention_table"]

COSTS: Mapping[str, Sequence[str]] = {
    "cost_deepvit": ("deepvit",),
    "cost_rmt": ("rmt",),
    "cost_eanet": ("eanet",),
    "cost_vit_pytorch": ("vit_pytorch_deepvit", "vit_pytorch_small"),
    "cost_spt_lsa": tuple(name for name in SYSTEMS if name.removesuffix("_spt_lsa") in LSA_FAMILIES),
}
"""Marker → the systems of the table at this marker."""

_RUNNERS = ("openvino+kernels", "openvino+kernels:bf16", "openvino+kernels:int8")
_TWINS = _RUNNERS[:-1]


def cost_tables(fastest: Mapping[str, Any], costs: Mapping[str, Any]) -> dict[str, str]:
    """Return marker → table.  fastest, costs: name of a model → result of ``fastest_cpu`` and of ``mask_cost``."""
    return {marker: cost_table(names, fastest, costs) for marker, names in COSTS.items()}


def cost_table(names: Sequence[str], fastest: Mapping[str, Any], costs: Mapping[str, Any]) -> str:
    """Return a table with a row for each system and batch.

    The columns are the time in eager PyTorch, the time of the fastest program of users without this project in float32
    and in bf16, the time of each of our programs with the ratio to this program, the share of the roofline of the
    program ``openvino+kernels``, and the time with the constants of the attention / time without. The last column
    exists only if a system of the table has a plain twin. A cross marks rows for which the run card of ``fastest_cpu``
    is INVALID.
    """
    with_twins = any(SYSTEMS[name].plain is not None for name in names)
    lines = []
    for name in names:
        measured, of_twins = fastest.get(name, {}), costs.get(name, {})
        for batch in ("1", "64"):
            rows, twins = measured.get(batch, {}), of_twins.get(batch, {})
            if not rows and not twins:
                continue
            added = ", ".join(interval(twins[key]["over_plain"], 3) for key in _TWINS if key in twins)
            cells = (
                f"{name}, {batch}{cross_of(measured, batch)}",
                f"{rows['eager']['median_ms']:.1f}" if rows else "",
                _best(rows),
                *(_time(rows, runner) for runner in _RUNNERS),
                _share(rows, "openvino+kernels"),
                *([added] if with_twins else []),
            )
            lines.append(cells)
    head = (
        "model, batch",
        "eager, ms",
        "best straight program, ms: fp32, bf16",
        *(f"{name}, ms" for name in _RUNNERS),
        "share of the roofline: openvino+kernels",
        *(["with / without the constants: fp32 and bf16"] if with_twins else []),
    )
    return table(head, lines) if lines else "No result has these times yet."


def _best(rows: Mapping[str, Any]) -> str:
    best = best_straight_of(rows)
    return ", ".join(f"{rows[best[key]]['median_ms']:.2f}" for key in ("fp32", "bf16") if key in best)


def _time(rows: Mapping[str, Any], runner: str) -> str:
    row = row_of(rows, runner)
    if row is None:
        return ""
    ratio = row.get("times_faster_than_best_straight")
    faster = "" if ratio is None else f" ({ratio['median']:.2f} ×)"
    return f"{row['median_ms']:.2f}{faster}" + (", no kernels" if "without_kernels" in row else "")


def _share(rows: Mapping[str, Any], runner: str) -> str:
    row = row_of(rows, runner)
    return f"{row['share_of_roofline']:.0%}" if row is not None and "share_of_roofline" in row else ""


def masked_attention_table(attentions: Mapping[str, Any]) -> str:
    """Return a table with a row for each shape and data type: the time of each program / the time of ``plain``.

    attentions: shape and data type → name of a program → its row in the result of ``masked_attention_gpu``.
    """
    programs = [name for name in next(iter(attentions.values())) if name != "plain"]
    rows = [
        (name, f"{row['plain']['ms']:.3f}", *(interval(row[program]["over_plain"]) for program in programs))
        for name, row in attentions.items()
    ]
    return table(("shape, data type", "plain, ms", *programs), rows)
