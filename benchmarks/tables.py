"""The README's tables, from the results that stand beside the scripts.

python benchmarks/tables.py          prints them
python benchmarks/tables.py --write  puts them into README.md, between their markers
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PAGE = RESULTS / "engines.md"
OVERVIEW = RESULTS / "README.md"
FAMILIES = ("vit", "swin", "cait", "pit", "t2t")


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


def _interval(found: dict[str, float], digits: int = 2) -> str:
    return f"{found['median']:.{digits}f} ({found['low']:.{digits}f}–{found['high']:.{digits}f})"


CPU_RUNNERS = ("straight export", "onnxruntime", "openvino", "openvino:bf16", "openvino:int8")
GPU_RUNNERS = ("compile", "tensorrt", "tensorrt:fp16", "tensorrt:int8")


def fastest_table(results: dict[str, Any], runners: tuple[str, ...] = CPU_RUNNERS) -> str:
    """Family and batch: how many times faster than eager PyTorch each runner is."""
    lines = [
        f"| family, batch | eager ms | {' | '.join(runners)} | cores far apart |",
        "|---" * (len(runners) + 3) + "|",
    ]
    for family, found in results.items():
        for batch in (key for key in ("1", "64") if key in found):
            rows = found[batch]
            cells = [_interval(rows[name]["times_faster_than_eager"]) if name in rows else "" for name in runners]
            far = [row["far"] for row in rows.values() if "far" in row]
            apart = f"{sum(far) / len(far):.0%} of the time" if far else "?"
            lines.append(f"| {family}, {batch} | {rows['eager']['median_ms']:.1f} | {' | '.join(cells)} | {apart} |")
    return "\n".join(lines)


def mask_free_table(results: dict[str, Any], costs: dict[str, Any], runners: tuple[str, ...] = CPU_RUNNERS[1:]) -> str:
    """Family and batch: time with a mask over time without, by runner; and shares of the roofline.

    costs: what has the former; for a GPU the same results.  runners: the last of them has no twin without a mask.
    In brackets the share while a CPU's cores were near each other, where they were not always.
    """
    masked, shares = runners[:-1], runners
    lines = [
        f"| family, batch | {' | '.join(f'over plain: {name}' for name in masked)} "
        f"| {' | '.join(f'roofline: {name}' for name in shares)} |",
        "|---" * (len(masked) + len(shares) + 1) + "|",
    ]
    for family, found in results.items():
        for batch in (key for key in ("1", "64") if key in found):
            rows = found[batch]
            twins = costs["families"][family][batch]
            over = [_interval(twins[name]["over_plain"], 3) if name in twins else "" for name in masked]
            share = [_share(rows[name]) if name in rows else "" for name in shares]
            lines.append(f"| {family}, {batch} | {' | '.join(over)} | {' | '.join(share)} |")
    return "\n".join(lines)


def _share(row: dict[str, Any]) -> str:
    near = f" ({row['near']['share_of_roofline']:.0%})" if row.get("far") and "near" in row else ""
    return f"{row['share_of_roofline']:.0%}{near}"


def served_table(results: dict[str, Any]) -> str:
    """Runtime: images a second in process and served, and single-image arrivals below the bound."""
    lines = [
        "| runtime | images/s in process | share over gRPC | share over HTTP | arrivals/s, gRPC | arrivals/s, HTTP |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in results["runtimes"].items():
        shares = [_interval(row["share_of_in_process"][protocol]) for protocol in ("grpc", "http")]
        bests = [load["best"] for load in row.get("arrivals", [])]
        rates = [f"{best['rate']:,.0f}, p99 {best['p99_ms']:.0f} ms" if best else "none" for best in bests]
        cells = [f"{row['cells'][0]['images_per_second']:,.0f}", *shares, *(rates or ["", ""])]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def chunks_table(results: dict[str, Any]) -> str:
    """Rows at once: time over ONNX Runtime with the whole batch at once."""
    programs = results["programs"]
    sizes = dict.fromkeys(name.split(", ")[1] for name in programs if name != "onnxruntime, whole")
    columns = [(runtime, at_once) for runtime in ("onnxruntime", "openvino") for at_once in (1, 2)]
    lines = [f"| {' | '.join(['', *(f'{a}, {b} at once' for a, b in columns)])} |", "|---" * (len(columns) + 1) + "|"]
    for size in sizes:
        cells = [_interval(programs[f"{a}, {size}, {b} at once"]["over_whole"]) for a, b in columns]
        lines.append(f"| {size} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spinning_table(results: dict[str, Any]) -> str:
    """How long threads look for more work: an image's time over the default's, alone and in turn with another."""
    lines = ["| spins | alone, ms | alone | beside another | spent after, ms |", "|---" * 5 + "|"]
    for name, row in results["settings"].items():
        over = [_interval(row[f"{column}_over_default"]) for column in ("alone", "beside")]
        lines.append(f"| {name} | {row['alone_ms']:.2f} | {' | '.join(over)} | {row['spent_after_ms']:.0f} |")
    return "\n".join(lines)


def ranks_table(results: dict[str, Any]) -> str:
    """Family: ranks of its masks; and below, what fused attention on wider heads would cost."""
    lines = ["| family | tokens | rank: least, median, most | the same at 1e-3 |", "|---|---|---|---|"]
    for family, found in results["ranks"].items():
        tokens, exact, coarse = (", ".join(map(str, found[key])) for key in ("tokens", "exact", "coarse"))
        lines.append(f"| {family} | {tokens.replace(', ', ' to ')} | {exact} | {coarse} |")
    lines += ["", "| rank | fused attention on wide heads, over product, mask, softmax, product |", "|---|---|"]
    lines += [f"| {rank} | {_interval(found)} |" for rank, found in results["fused_over_masked"].items()]
    return "\n".join(lines)


def where_table(results: dict[str, Any], *families: str) -> str:
    """Runner and rows at once: what an image's time goes to, and how near products come to the best rate."""
    lines = [
        "| family, runner, rows | ms | products | attention | mask | layout | norms | rest "
        "| of products' best rate | the mask costs |",
        "|---" * 10 + "|",
    ]
    for family in families or results["families"]:
        for program, found in results["families"][family]["programs"].items():
            for rows, chunk in found["rows"].items():
                shares = [f"{ms / chunk['ms']:.0%}" if ms else "" for ms in chunk["spent_ms"].values()]
                reached = f"{chunk['products_at_best_ms'] / chunk['spent_ms']['products']:.0%}"
                cells = [f"{family}, {program}, {rows}", f"{chunk['ms']:.2f}", *shares, reached]
                cells.append(f"{chunk['mask_ms'] / chunk['ms']:.1%}" if "mask_ms" in chunk else "")
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def target_sentence(results: dict[str, Any]) -> str:
    """What 5 times eager would take of the fastest runner for ViT."""
    found = results["families"]["vit"]["programs"]["openvino:int8"]["rows"]
    rows, chunk = next((rows, chunk) for rows, chunk in found.items() if "target" in chunk)
    target, spent = chunk["target"], chunk["spent_ms"]
    return (
        f"Five times eager at a batch of 64 would be {target['chunk_ms']:.1f} ms for a chunk of {rows} images on one "
        f"core, where int8 takes {chunk['ms']:.1f}: {spent['products']:.1f} in products, {spent['attention']:.1f} in "
        f"attention, {target['others_ms'] - spent['attention']:.1f} in all else. With products at the best int8 rate "
        f"({chunk['products_at_best_ms']:.1f} ms) {target['left_for_others_ms']:.1f} ms would be left for what now "
        f"takes {target['others_ms']:.1f}."
    )


def layouts_table(results: dict[str, Any]) -> str:
    """Family and batch: time with channels first over the time of the exported graph."""
    lines = ["| family, batch | with a mask | without |", "|---|---|---|"]
    for family, found in results["families"].items():
        for batch in (key for key in ("1", "64") if key in found):
            cells = [_interval(found[batch][key]) for key in ("gmm", "plain")]
            lines.append(f"| {family}, {batch} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shared_memory_table(results: dict[str, Any]) -> str:
    """Protocol and batch: time with shared memory over time with messages."""
    lines = ["| protocol, batch | messages, ms | shared memory over messages |", "|---|---|---|"]
    for protocol in ("grpc", "http"):
        for batch, row in results[protocol].items():
            found = row["shared_over_messages"]
            interval = f"{found['median']:.3f} ({found['low']:.3f}–{found['high']:.3f})"
            lines.append(f"| {protocol}, {batch} | {row['messages_ms']:.2f} | {interval} |")
    return "\n".join(lines)


def policy_table() -> str:
    """The precision policy."""
    from gmmvit_deploy.precision import POLICY, PRECISIONS

    lines = [f"| role | {' | '.join(PRECISIONS)} |", "|---" * (len(PRECISIONS) + 1) + "|"]
    lines += [f"| {role} | {' | '.join(kinds[p] for p in PRECISIONS)} |" for role, kinds in POLICY.items()]
    return "\n".join(lines)


def overview() -> str:
    """A page: what each script is asked, what it gave here, and its run card."""
    found = {**tables(), **tables_of_the_page()}
    shown = {
        "fastest_cpu": ("fastest_cpu",),
        "mask_cost": ("mask_free",),
        "served": ("served",),
        "cpu_settings": ("cpu_settings",),
        "spinning": ("spinning",),
        "low_rank": ("low_rank",),
        "where_time_goes": ("where_all",),
        "layouts": ("layouts",),
        "shared_memory": ("shared_memory",),
        "parity_limits": ("parity_limits",),
        "engines": ("engines", "head_dims"),
    }
    if "fastest_gpu" in found:
        shown = {"fastest_gpu": ("fastest_gpu", "mask_free_gpu"), **shown}
    lines = [
        "# Results",
        "",
        "Written by `python benchmarks/tables.py --write`; `make bench` measures again. A run of times is INVALID when "
        "the machine was busy before or after it, its clock changed, a ratio's interval is wider than a quarter of "
        "the ratio, or a program was faster than its roofline.",
    ]
    for script, markers in shown.items():
        question = ast.get_docstring(ast.parse((ROOT / "benchmarks" / f"{script}.py").read_text())) or ""
        lines += ["", f"## {script}.py", "", question.partition("\n")[0], ""]
        lines += [part for marker in markers for part in (found[marker], "")]
        if (RESULTS / script).is_dir():
            for name, result in by_family(script).items():
                lines += [f"### {name}", "", *card_lines(result["card"]), ""]
            lines.pop()
        else:
            lines += card_lines(json.loads((RESULTS / f"{script}.json").read_text())["card"])
    return "\n".join([*lines, ""])


def by_family(script: str) -> dict[str, Any]:
    """What a script gave that measures families one by one, in the paper's order."""
    found = {path.stem: json.loads(path.read_text()) for path in (RESULTS / script).glob("*.json")}
    return {name: found[name] for name in FAMILIES if name in found}


def card_lines(card: dict[str, Any]) -> list[str]:
    """A run card in words."""
    versions = ", ".join(f"{name} {version}" for name, version in card["versions"].items())
    settings = ", ".join(f"{name} {value}" for name, value in card["settings"].items())
    lines = []
    if "verdict" in card:  # older results have none
        lines += [f"**{card['verdict']}**", "", *(f"- {reason}" for reason in card["reasons"]), ""]
    lines.append(
        f"{settings}. {card['cores']} cores of {card['cpu']}, load {card['load_before']:.1f} before and "
        f"{card['load_after']:.1f} after, {card['seconds']:.0f} s; Python {card['python']}, {versions}."
    )
    return lines


def tables() -> dict[str, str]:
    """Marker in the README → its table."""
    engines = json.loads((RESULTS / "engines.json").read_text())
    limits = json.loads((RESULTS / "parity_limits.json").read_text())
    fastest = by_family("fastest_cpu")
    names = ("mask_cost", "served", "cpu_settings", "spinning", "low_rank", "where_time_goes")
    costs, served, chunks, spinning, ranks, where = (
        json.loads((RESULTS / f"{name}.json").read_text()) for name in names
    )
    return {
        "fastest_cpu": fastest_table(fastest),
        "mask_free": mask_free_table(fastest, costs),
        "served": served_table(served),
        "cpu_settings": chunks_table(chunks),
        "spinning": spinning_table(spinning),
        "low_rank": ranks_table(ranks),
        "where": where_table(where, "vit"),
        "target": target_sentence(where),
        "policy": policy_table(),
        "parity_limits": limits_table(limits),
        "engines": engines_table(engines),
        "head_dims": head_dims_table(engines),
    }


def tables_of_the_page() -> dict[str, str]:
    """Those that stand on the page of results and not in the README; a GPU's where one was measured."""
    names = ("where_time_goes", "layouts", "shared_memory")
    where, layouts, shared = (json.loads((RESULTS / f"{name}.json").read_text()) for name in names)
    found = {
        "where_all": where_table(where),
        "layouts": layouts_table(layouts),
        "shared_memory": shared_memory_table(shared),
    }
    gpu = by_family("fastest_gpu")
    if gpu:
        found["fastest_gpu"] = fastest_table(gpu, GPU_RUNNERS)
        found["mask_free_gpu"] = mask_free_table(gpu, {"families": gpu}, GPU_RUNNERS[1:])
    return found


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
        OVERVIEW.write_text(overview())
        PAGE.write_text(every_engine(json.loads((RESULTS / "engines.json").read_text())))
        return
    for marker, table in tables().items():
        print(f"{marker}\n{table}\n")


if __name__ == "__main__":
    main()
