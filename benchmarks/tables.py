"""The README's tables, from the results that stand beside the scripts.

python benchmarks/tables.py          prints them
python benchmarks/tables.py --write  puts them into README.md, between their markers
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PAGE = RESULTS / "engines.md"


def engines_table(results: dict[str, Any]) -> str:
    """Family and mask: attentions that are one kernel, kernels by precision, and what the mask changes in fp16."""
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
    """A page: one row an engine."""
    card = results["card"]
    lines = [
        "# What is in the engines",
        "",
        f"`python benchmarks/engines.py`, with {card['settings']['flavor']} for compute capability "
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

    def line(form: str, one: dict[str, Any], error: float) -> str:
        counts = f"{one['layers']} | {one['kernels']} | {one['fused']} of {one['attentions']}"
        return f"{start} | {form} | {counts} | {one['bytes'] / 2**20:.2f} | {error:.1e} |"

    return [
        line("folded", row, unfolded["folded_error"]),
        f"{start} | M = 1 | {twin['layers']} | {kernels} |  | {twin['bytes'] / 2**20:.2f} |  |",
        line("unfolded", unfolded, unfolded["error"]),
    ]


def head_dims_table(results: dict[str, Any]) -> str:
    """Head dim: kernels and fused attentions of a ViT of two blocks, as it is and padded."""
    lines = [
        "| head dim | as it is: one kernel, kernels in all | padded: one kernel, kernels in all |",
        "|---|---|---|",
    ]
    for head_dim, forms in results["head_dims"].items():
        cells = [f"{form['fused']} of {form['attentions']}, {form['kernels']}" for form in forms.values()]
        lines.append(f"| {head_dim} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


NO_MISTAKE_HERE = "the closed-form Gaussian mask in place of the stored base's"
"""Where no base has underflowed the closed form is the same mask, and shows as such: within the noise."""


def limits_table(results: dict[str, Any]) -> str:
    """Family: right runners in units of the noise, and the mistake that shows least over the limit."""
    lines = [
        "| family | ONNX Runtime, over the noise: largest, rms | fp16, bf16, over the scaled noise "
        "| least mistake, over the limit |",
        "|---|---|---|---|",
    ]
    models = results["models"]
    for family in dict.fromkeys(name.partition("_")[0] for name in models):
        rows = [row for name, row in models.items() if name.partition("_")[0] == family]
        runner = ", ".join(f"{max(row['runner'][key] for row in rows):.1f}" for key in ("largest", "rms"))
        halves = ", ".join(f"{max(row[one]['largest'] for row in rows):.1f}" for one in ("fp16", "bf16"))
        mistakes = [
            (ratio, name)
            for row in rows
            for name, ratio in row["mistakes_over_limit"].items()
            if name != NO_MISTAKE_HERE or ratio > 0.5
        ]
        ratio, name = min(mistakes)
        lines.append(f"| {family} | {runner} | {halves} | {ratio:.1f}: {name} |")
    return "\n".join(lines)


def policy_table() -> str:
    """The precision policy."""
    from gmmvit_deploy.precision import POLICY, PRECISIONS

    lines = [f"| role | {' | '.join(PRECISIONS)} |", "|---" * (len(PRECISIONS) + 1) + "|"]
    lines += [f"| {role} | {' | '.join(kinds[p] for p in PRECISIONS)} |" for role, kinds in POLICY.items()]
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """Marker in the README → its table."""
    engines = json.loads((RESULTS / "engines.json").read_text())
    limits = json.loads((RESULTS / "parity_limits.json").read_text())
    return {
        "policy": policy_table(),
        "parity_limits": limits_table(limits),
        "engines": engines_table(engines),
        "head_dims": head_dims_table(engines),
    }


def written(text: str) -> str:
    """``text`` with every table between its markers."""
    for marker, table in tables().items():
        text = re.sub(
            rf"<!-- {marker} -->.*?<!-- /{marker} -->",
            f"<!-- {marker} -->\n{table}\n<!-- /{marker} -->",
            text,
            flags=re.DOTALL,
        )
    return text


def main() -> None:
    if "--write" in sys.argv:
        readme = ROOT / "README.md"
        readme.write_text(written(readme.read_text()))
        PAGE.write_text(every_engine(json.loads((RESULTS / "engines.json").read_text())))
        return
    for marker, table in tables().items():
        print(f"{marker}\n{table}\n")


if __name__ == "__main__":
    main()
