"""Tables of the engines' contents."""

from __future__ import annotations

from typing import Any

__all__ = ["engines_table", "every_engine", "head_dims_table"]


def engines_table(results: dict[str, Any]) -> str:
    """Return a table by family and mask: fused attentions, kernels by precision, effect of the mask in fp16."""
    lines = [
        "| model | one kernel, fp16 | kernels fp32 / fp16 / bf16 / int8 / fp8 | fp16 MiB "
        "| kernels more than with M = 1 | logits off: folded / unfolded |",
        "|---|---|---|---|---|---|",
    ]
    for family, masks in results["families"].items():
        for mask, rows in masks.items():
            half = rows["fp16"]
            kernels = " / ".join(str(row["kernels"]) for row in rows.values())
            twin = str(half["twin"]["kernels_more"]) if "twin" in half else ""
            errors = ""
            if "unfolded" in half:
                errors = f"{half['unfolded']['folded_error']:.1e} / {half['unfolded']['error']:.1e}"
            fused = f"{half['fused']} of {half['attentions']}"
            lines.append(f"| {family} {mask} | {fused} | {kernels} | {half['bytes'] / 2**20:.1f} | {twin} | {errors} |")
    return "\n".join(lines)


def every_engine(results: dict[str, Any]) -> str:
    """Return a page with a row for each engine."""
    card = results["card"]
    lines = [
        "# What is in the engines",
        "",
        f"`python benchmarks/reported/engines.py`, with {card['settings']['flavor']} for compute capability "
        f"{card['settings']['capability']}; models, columns and method are explained at the top of the script. "
        f"Build times on {card['cores']} cores of {card['cpu']}, load {card['load_before']:.1f} before and "
        f"{card['load_after']:.1f} after; they say no more than that builds take seconds.",
        "",
        "| family | mask | precision | layers | kernels | one kernel | missed type | MiB | build s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    against = ["", "fp16, masked: the engine against its twin with M = 1 and against the unfolded export.", ""]
    against += [
        "| family | mask | form | layers | kernels | one kernel | MiB | logits off |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for family, masks in results["families"].items():
        for mask, rows in masks.items():
            for precision, row in rows.items():
                fused = f"{row['fused']} of {row['attentions']}"
                size = f"{row['bytes'] / 2**20:.2f} | {row['build_seconds']:.1f}"
                counts = f"{row['layers']} | {row['kernels']}"
                lines.append(f"| {family} | {mask} | {precision} | {counts} | {fused} | {row['misses']} | {size} |")
            if "twin" in rows["fp16"]:
                against += _forms(f"| {family} | {mask}", rows["fp16"])
    return "\n".join([*lines, *against, ""])


def _forms(start: str, row: dict[str, Any]) -> list[str]:
    unfolded, twin = row["unfolded"], row["twin"]
    kernels = row["kernels"] - twin["kernels_more"]

    def line(form: str, engine: dict[str, Any], error: float) -> str:
        counts = f"{engine['layers']} | {engine['kernels']} | {engine['fused']} of {engine['attentions']}"
        return f"{start} | {form} | {counts} | {engine['bytes'] / 2**20:.2f} | {error:.1e} |"

    return [
        line("folded", row, unfolded["folded_error"]),
        f"{start} | M = 1 | {twin['layers']} | {kernels} |  | {twin['bytes'] / 2**20:.2f} |  |",
        line("unfolded", unfolded, unfolded["error"]),
    ]


def head_dims_table(results: dict[str, Any]) -> str:
    """Return a table by head dim: kernels and fused attentions of a ViT of two blocks, unpadded and padded."""
    lines = [
        "| head dim | as it is: one kernel, kernels in all | padded: one kernel, kernels in all |",
        "|---|---|---|",
    ]
    for head_dim, forms in results["head_dims"].items():
        cells = [f"{form['fused']} of {form['attentions']}, {form['kernels']}" for form in forms.values()]
        lines.append(f"| {head_dim} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)
