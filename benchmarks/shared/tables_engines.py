"""Make the tables of the engines' contents."""

from __future__ import annotations

from typing import Any

from benchmarks.shared.results import table
from gmmvit_deploy.inference.precision import PRECISIONS


def engines_table(results: dict[str, Any]) -> str:
    """Return a table with a row for each family and mask: fused attentions, kernels by precision, cost of the mask."""
    precisions = results["families"]["vit"]["gmm"]
    lines = []
    for family, masks in results["families"].items():
        for mask, rows in masks.items():
            half = rows["fp16"]
            unfolded = half.get("unfolded", {})
            errors = (f"{unfolded[key]:.1e}" if unfolded else "" for key in ("folded_error", "error"))
            kernels = (str(row["kernels"]) for row in rows.values())
            lines.append((f"{family} {mask}", _fused(half), *kernels, _mebibytes(half), _more_kernels(half), *errors))
    head = (
        "model",
        "fused attentions, fp16",
        *(f"kernels, {precision}" for precision in precisions),
        "fp16, MiB",
        "kernels for the masks, fp16",
        "error, folded",
        "error, unfolded",
    )
    return table(head, lines)


def systems_table(systems: dict[str, dict[str, Any]]) -> str:
    """Return a row for each system: fused attentions and reasons, kernels by precision, cost of masks."""
    precisions = [p for p in PRECISIONS if any(p in result["precisions"] for result in systems.values())]
    lines = []
    for name, result in systems.items():
        rows = result["precisions"]
        kernels = (str(rows[precision]["kernels"]) if precision in rows else "" for precision in precisions)
        fused = reasons = size = more = ""
        if half := rows.get("fp16"):
            fused, reasons = _fused(half), "; ".join(half["why_not"])
            size, more = _mebibytes(half), _more_kernels(half)
        lines.append((name.replace("_", " "), result["preset"], fused, reasons, *kernels, size, more))
    head = (
        "system",
        "size",
        "fused attentions, fp16",
        "reason for the others, fp16",
        *(f"kernels, {precision}" for precision in precisions),
        "fp16, MiB",
        "kernels more than the plain twin, fp16",
    )
    return table(head, lines)


def head_dims_table(results: dict[str, Any]) -> str:
    """Return a table with a row for each head dim: fused attentions and kernels of a small ViT, unpadded and padded."""
    lines = [
        (head_dim, *(cell for form in forms.values() for cell in (_fused(form), str(form["kernels"]))))
        for head_dim, forms in results["head_dims"].items()
    ]
    columns = (f"{what}, {form}" for form in ("not padded", "padded") for what in ("fused attentions", "kernels"))
    return table(("head dim", *columns), lines)


def _fused(engine: dict[str, Any]) -> str:
    return f"{engine['fused']} of {engine['attentions']}"


def _mebibytes(engine: dict[str, Any]) -> str:
    return f"{engine['bytes'] / 2**20:.1f}"


def _more_kernels(engine: dict[str, Any]) -> str:
    return str(engine["twin"]["kernels_more"]) if "twin" in engine else ""
