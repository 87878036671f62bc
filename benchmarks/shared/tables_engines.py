"""Make the tables of the engines' contents."""

from __future__ import annotations

from typing import Any

from gmmvit_deploy.inference.precision import PRECISIONS


def engines_table(results: dict[str, Any]) -> str:
    """Return a table with a row for each family and mask: fused attentions, kernels by precision, cost of the mask."""
    lines = [
        "| model | fused attentions, fp16 | kernels, fp32 | kernels, fp16 | kernels, bf16 | kernels, int8 "
        "| kernels, fp8 | fp16, MiB | kernels for the masks, fp16 | error, folded | error, unfolded |",
        "|---" * 11 + "|",
    ]
    for family, masks in results["families"].items():
        for mask, rows in masks.items():
            half = rows["fp16"]
            kernels = " | ".join(str(row["kernels"]) for row in rows.values())
            twin = str(half["twin"]["kernels_more"]) if "twin" in half else ""
            errors = "|"
            if "unfolded" in half:
                errors = f"{half['unfolded']['folded_error']:.1e} | {half['unfolded']['error']:.1e}"
            fused = f"{half['fused']} of {half['attentions']}"
            lines.append(f"| {family} {mask} | {fused} | {kernels} | {half['bytes'] / 2**20:.1f} | {twin} | {errors} |")
    return "\n".join(lines)


def systems_table(systems: dict[str, dict[str, Any]]) -> str:
    """Return a row for each system: fused attentions and reasons, kernels by precision, cost of masks."""
    precisions = [p for p in PRECISIONS if any(p in result["precisions"] for result in systems.values())]
    kernels = " | ".join(f"kernels, {precision}" for precision in precisions)
    lines = [
        f"| system | size | fused attentions, fp16 | reason for the others, fp16 | {kernels} | fp16, MiB "
        "| kernels more than the plain twin, fp16 |",
        "|---" * (6 + len(precisions)) + "|",
    ]
    for name, result in systems.items():
        rows = result["precisions"]
        counts = [str(rows[precision]["kernels"]) if precision in rows else "" for precision in precisions]
        half = rows.get("fp16")
        if half is None:
            fused, reasons, size, twin = "", "", "", ""
        else:
            fused, reasons = f"{half['fused']} of {half['attentions']}", "; ".join(half["why_not"])
            size = f"{half['bytes'] / 2**20:.1f}"
            twin = str(half["twin"]["kernels_more"]) if "twin" in half else ""
        cells = (name.replace("_", " "), result["preset"], fused, reasons, *counts, size, twin)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def every_engine(results: dict[str, Any], systems: dict[str, dict[str, Any]]) -> str:
    """Return the page of engines, a row for each.  results: of the families.  systems: name → result."""
    card = results["card"]
    lines = [
        "# What is in the engines",
        "",
        f"`python benchmarks/engines.py` built these engines with {card['settings']['flavor']} for compute "
        f"capability {card['settings']['capability']}. The top of the script describes the models and the method.",
        "",
        "- *Layers* includes shape arithmetic, *kernels* does not.",
        "- *Fused attentions*: the number of attentions that a single kernel computes.",
        "- *Other type*: the number of matrix products and convolutions that run in another type than the precision "
        "prescribes.",
        f"- *Build, s*: the build time in seconds, on {card['cores']} cores of {card['cpu']} with a load of "
        f"{card['load_before']:.1f} before and {card['load_after']:.1f} after. The load makes these times imprecise.",
        "",
        "| family | mask | precision | layers | kernels | fused attentions | other type | MiB | build, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    against = [
        "",
        (
            "The second table compares fp16 engines of models with a mask, in three forms: *folded* is the engine of "
            "the first table; *M = 1* is built from the same graph with every mask entry set to 1; *unfolded* is built "
            "from the PyTorch model, cast to half precision and exported without folding. *Error* is the largest "
            "difference from PyTorch's float32 logits, divided by the largest logit, with all fp16 roundings emulated "
            "on the CPU."
        ),
        "",
    ]
    against += [
        "| family | mask | form | layers | kernels | fused attentions | MiB | error |",
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
    return "\n".join([*lines, *against, *_of_systems(systems), ""])


def _of_systems(systems: dict[str, dict[str, Any]]) -> list[str]:
    if not systems:
        return []
    lines = [
        "",
        "The third table has the engines of the [systems with another attention](../../docs/pages/engines.md), each "
        "at the size of its preset.",
        "",
        "| system | precision | layers | kernels | fused attentions | reasons for the others | other type | MiB "
        "| build, s |",
        "|---" * 9 + "|",
    ]
    for name, result in systems.items():
        for precision, row in result["precisions"].items():
            cells = (
                f"{name.replace('_', ' ')} | {precision} | {row['layers']} | {row['kernels']}",
                f"{row['fused']} of {row['attentions']} | {'; '.join(row['why_not'])} | {row['misses']}",
                f"{row['bytes'] / 2**20:.2f} | {row['build_seconds']:.1f}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return lines


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
    """Return a table with a row for each head dim: fused attentions and kernels of a small ViT, unpadded and padded."""
    lines = [
        "| head dim | fused attentions, not padded | kernels, not padded "
        "| fused attentions, padded | kernels, padded |",
        "|---|---|---|---|---|",
    ]
    for head_dim, forms in results["head_dims"].items():
        cells = [f"{form['fused']} of {form['attentions']} | {form['kernels']}" for form in forms.values()]
        lines.append(f"| {head_dim} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)
