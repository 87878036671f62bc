"""Make the tables of the results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks.shared.places import FAMILIES
from benchmarks.shared.results import best_straight_of, by_family, by_run, cross_of, interval, result, row_of, table
from benchmarks.shared.tables_engines import engines_table, head_dims_table, systems_table
from benchmarks.shared.tables_gains import gains_table, headline_table
from benchmarks.shared.tables_int8 import FEW, compared_table
from benchmarks.shared.tables_serving import (
    gateway_cost_table,
    hostile_memory,
    hostile_summary,
    hostile_table,
    one_image_parts_table,
    one_image_table,
    overload_table,
    peers_table,
    rollout_table,
)
from benchmarks.shared.timm_architectures import ARCHITECTURES
from benchmarks.timm_sweep import NETWORKS

SHOWN = {
    "fastest_gpu": ("fastest_gpu", "mask_free_gpu"),
    "masked_attention_gpu": ("masked_attention",),
    "fastest_cpu": ("fastest_cpu", "best_straight"),
    "mask_cost": ("mask_free",),
    "served": ("served",),
    "one_image": ("one_image", "one_image_parts"),
    "overload": ("overload",),
    "gateway_cost": ("gateway_cost",),
    "where_time_goes": ("where_all",),
    "parity_limits": ("parity_limits",),
    "engines": ("engines", "engine_systems", "head_dims"),
    "before_after": ("before_after",),
    "timm_models": ("timm_models",),
    "timm_sweep": ("timm_sweep",),
    "hostile": ("hostile", "hostile_memory"),
    "rollout": ("rollout",),
    "served_peers": ("served_peers",),
}
"""Script → markers of the script's tables on the page of results.

The tables of fastest_gpu exist only with results from a GPU."""


def documented_tables() -> dict[str, str]:
    """Return name of a marker in the documentation → the table at this marker."""
    fastest, costs = by_family("fastest_cpu"), by_family("mask_cost")
    of_paper, costs_of_paper = _of_paper(fastest), _of_paper(costs)
    cascades = by_run("int8_cascade")
    return {
        "headline": headline_table(by_run("int8_real")),
        "compared": compared_table(cascades, ["dinov2_s14"]),
        "compared_peers": compared_table(cascades, ["pit"]),
        "compared_small": compared_table(cascades, ["vit", "swin", "cait", "pit", "t2t"], only=FEW),
        "gains": gains_table(fastest),
        "mask_free": mask_free_table(of_paper, costs_of_paper),
        "int8_at_64": int8_chunk_table(result("where_time_goes")),
        "served": served_table(result("served")),
        "overload": overload_table(result("overload")),
        "gateway_cost": gateway_cost_table(result("gateway_cost")),
        "policy": policy_table(),
        "parity_limits": limits_table(result("parity_limits")),
        "hostile_summary": hostile_summary(by_run("hostile")),
    }


def _of_paper(results: dict[str, Any]) -> dict[str, Any]:
    return {name: result for name, result in results.items() if name in FAMILIES}


def page_tables() -> dict[str, str]:
    """Return name of a marker → table, for the tables that the page of results alone shows, or shows for all models."""
    fastest, costs = by_family("fastest_cpu"), by_family("mask_cost")
    tables = {
        "fastest_cpu": fastest_table(fastest),
        "best_straight": best_straight_table(fastest),
        "mask_free": mask_free_table(fastest, costs),
        "masked_attention": masked_attention_table(result("masked_attention_gpu")["attentions"]),
        "timm_models": timm_table(by_run("timm_models")),
        "one_image": one_image_table(result("one_image")),
        "engines": engines_table(result("engines")),
        "engine_systems": systems_table(by_family("engines")),
        "one_image_parts": one_image_parts_table(result("one_image")),
        "where_all": where_table(_where()),
        "head_dims": head_dims_table(result("engines")),
        "before_after": before_after_table(by_run("before_after")),
        "hostile": hostile_table(by_run("hostile")),
        "hostile_memory": hostile_memory(by_run("hostile")),
        "timm_sweep": timm_sweep_table(result("timm_sweep")),
        "rollout": rollout_table(result("rollout")),
        "served_peers": peers_table(by_run("served_peers")),
    }
    if gpu := by_family("fastest_gpu"):
        tables["fastest_gpu"] = fastest_table(gpu, GPU_RUNNERS)
        tables["mask_free_gpu"] = mask_free_table(gpu, gpu, GPU_RUNNERS[1:])
    return tables


_TIMM_RATIOS = {
    "times_faster_than_straight_export": "over ONNX Runtime",
    "times_faster_than_straight_openvino": "over OpenVINO",
    "int8_times_faster_than_nncf": "int8 over NNCF",
}
"""Ratio of the times in a result of `timm_models.py` → the words of its column."""


def _timm_ratios(speed: dict[str, Any]) -> list[str]:
    """Return a text for each of `_TIMM_RATIOS`."""
    sign = "" if speed["card"]["verdict"] == "VALID" else " †"
    times = speed["batches"]
    return [
        ", ".join(interval(times[batch][key]) + sign for batch in times) if key in times["1"] else "–"
        for key in _TIMM_RATIOS
    ]


def timm_table(runs: dict[str, dict[str, Any]]) -> str:
    """Return a row for each measured architecture, and one for its speed on each other processor; a cross marks a speed
    whose run card is INVALID.  runs: file → result.
    """
    rows: list[Sequence[str]] = []
    speeds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in runs.values():
        if "batches" in run:
            speeds[run["model"]].append(run)
    by_model = {result["model"]: result for result in runs.values() if "batches" not in result}
    for name, row in sorted(by_model.items(), key=lambda item: list(ARCHITECTURES).index(item[0])):
        if "refused" in row:
            rows.append((name, f"refused: {row['refused']}", *["–"] * 7))
            continue
        precisions = row["precisions"]
        if unknown := precisions.get("unknown_operators"):
            halves = f"float32 only: {', '.join(unknown)}"
        else:
            halves = ", ".join(f"{each['distance'] / each['limit']:.2f}" for each in precisions.values())
        reasons = [
            f"{reason.partition(', expected')[0]} ({count} attention{'s' * (count > 1)})"
            for reason, count in row["reasons"].items()
        ]
        effect = "no attention" if row["least_effect"] is None else f"{row['least_effect']:,.0f}"
        fused = f"{row['fused']} of {row['fused'] + sum(row['reasons'].values())}" + "".join(f"; {r}" for r in reasons)
        rows.append(
            (
                name,
                f"{row['nodes']}, {row['straight_nodes']}",
                f"{max(row['difference'].values()) / row['limit']:.2f}",
                effect,
                halves,
                fused,
                *(_timm_ratios(speeds[name][0]) if speeds[name] else ["–"] * 3),
            )
        )
        rows += [(f"{name}, {run['card']['cpu']}", *["–"] * 5, *_timm_ratios(run)) for run in speeds[name][1:]]
    head = (
        "architecture",
        "nodes: ours, straight export",
        "largest difference / limit",
        "smallest effect of an attention, in limits",
        "fp16, bf16: difference / limit",
        "attentions in our CPU kernel",
        *(f"{words}, batch 1, 8 (64)" for words in _TIMM_RATIOS.values()),
    )
    return table(head, rows)


def timm_sweep_table(result: dict[str, Any]) -> str:
    """Return the number of results, and a table with a row for each network of timm that has a result."""
    rows = []
    for name, row in sorted(result["networks"].items(), key=lambda item: item[1]["file"]):
        share = f"{row['difference'] / row['limit']:.2f}" if "difference" in row else "–"
        outcome = f"{row['result']}: {row['reason']}" if "reason" in row else row["result"]
        side, millions = row["image_size"][0], row["parameters"] / 1e6
        rows.append((f"{row['file']}.py", name, f"{millions:.1f}", str(side), outcome, share))
    head = ("file of timm", "network", "million parameters", "side of the images", "result", "difference / limit")
    return f"{len(rows)} of {len(NETWORKS)} networks have a result.\n\n{table(head, rows)}"


def before_after_table(runs: dict[str, dict[str, Any]]) -> str:
    """Return a table with a row for each program of each run: time after / time before, and the A/A control."""
    rows = []
    for run, results in runs.items():
        settings = results["card"]["settings"]
        name = f"{run.replace('_', ' ')}, {settings['before'][:7]} to {settings['after'][:7]}"
        for family, runners in results["families"].items():
            for runner, batches in runners.items():
                for batch, row in batches.items():
                    ratios = (interval(row[key], 3) for key in ("after_over_before", "control_over_before"))
                    cells = (name, f"{family}, {runner}, {batch}", f"{row['before_ms']:.2f}", *ratios)
                    rows.append((*cells, f"{row['allowed']:.1%}", row["verdict"]))
    head = (
        "run, commits before and after",
        "family, runner, batch",
        "before, ms",
        "after / before",
        "control / before",
    )
    return table((*head, "allowed difference", "verdict"), rows)


def _where() -> dict[str, Any]:
    joined = result("where_time_goes")
    for measured in by_family("where_time_goes").values():
        joined["families"] |= measured["families"]
    return joined


NO_MISTAKE_HERE = "the closed-form Gaussian mask in place of the stored base's"
"""If the stored base has no underflow, the closed form computes the same mask, and this mistake has no effect."""


def limits_table(results: dict[str, Any]) -> str:
    """Return for each family the distances of correct runners, in float32 noise, and the smallest mistake."""
    lines = []
    models = results["models"]
    for family in dict.fromkeys(name.partition("_")[0] for name in models):
        rows = [row for name, row in models.items() if name.partition("_")[0] == family]
        runner = [f"{max(row['runner'][key] for row in rows):.1f}" for key in ("largest", "rms")]
        halves = [f"{max(row[precision]['largest'] for row in rows):.1f}" for precision in ("fp16", "bf16")]
        mistakes = [
            (ratio, name)
            for row in rows
            for name, ratio in row["mistakes_over_limit"].items()
            if name != NO_MISTAKE_HERE or ratio > 0.5
        ]
        ratio, name = min(mistakes)
        lines.append((family, *runner, *halves, name, f"{ratio:.1f}"))
    head = (
        "family",
        "ONNX Runtime: largest / e",
        "ONNX Runtime: rms / e_rms",
        "fp16: largest / (2¹³ e)",
        "bf16: largest / (2¹⁶ e)",
        "mistake with the smallest effect",
        "its effect / limit",
    )
    return table(head, lines)


CPU_RUNNERS = (
    "straight export",
    "openvino+kernels",
    "openvino+kernels:bf16",
    "openvino+kernels:int8",
)
STRAIGHT_RUNNERS = ("torch.compile", "torch.compile:bf16", "straight openvino", "straight openvino:bf16")
GPU_RUNNERS = ("compile", "tensorrt", "tensorrt:fp16", "tensorrt:int8")


def fastest_table(results: dict[str, Any], runners: tuple[str, ...] = CPU_RUNNERS) -> str:
    """Return the speed-up of each runner over eager PyTorch, a row for each model and batch; a cross marks INVALID."""
    every = {name for by_batch in results.values() for rows in _batches(by_batch).values() for name in rows}
    runners = (*(name for name in STRAIGHT_RUNNERS if name in every and name not in runners), *runners)
    lines = []
    for family, by_batch in results.items():
        for batch, rows in _batches(by_batch).items():
            model = f"{family}, {batch}{cross_of(by_batch, batch)}"
            lines.append((model, f"{rows['eager']['median_ms']:.1f}", *(_speed_up(rows, name) for name in runners)))
    return table(("family, batch", "eager, ms", *(f"{name}, ×" for name in runners)), lines)


def _batches(by_batch: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {batch: by_batch[batch] for batch in ("1", "64") if batch in by_batch}


def _speed_up(rows: dict[str, Any], name: str) -> str:
    row = row_of(rows, name)
    if row is None:
        return ""
    if not row.get("right", True):
        return "wrong logits"
    return interval(row["times_faster_than_eager"]) + (", no kernels" if "without_kernels" in row else "")


def best_straight_table(results: dict[str, Any], runners: tuple[str, ...] = CPU_RUNNERS[1:-1]) -> str:
    """Return the best program of users without this project in each precision, its time / that of each of ours, the
    shares of the roofline, and the straight programs that are wrong or do not run; a row for each model and batch.
    """
    lines = []
    for model, by_batch in results.items():
        for batch, rows in _batches(by_batch).items():
            best = best_straight_of(rows)
            if not best:
                continue
            ratios = [_over_best(rows, name) for name in runners]
            left_out = [f"{name}: wrong logits" for name, row in rows.items() if not row.get("right", True)]
            left_out += [
                f"{name.partition(', batch ')[0]}: does not run"
                for name in by_batch.get("missing", {})
                if name.partition(", batch ")[2] in ("", batch)
            ]
            cells = (
                f"{model}, {batch}{cross_of(by_batch, batch)}",
                by_batch.get("size", ""),
                best.get("fp32", ""),
                best.get("bf16", ""),
            )
            lines.append((*cells, *ratios, "; ".join(left_out)))
    over = (f"best / {name}" for name in runners)
    head = ("model, batch", "size", "best, fp32", "best, bf16", *over, "not compared")
    return table(head, lines)


def _over_best(rows: dict[str, Any], name: str) -> str:
    row = row_of(rows, name)
    if row is None or "times_faster_than_best_straight" not in row:
        return ""
    shares = [each.get("share_of_roofline") for each in (rows.get(row["best_straight"], {}), row)]
    reached = "; {:.0%}, {:.0%}".format(*shares) if None not in shares else ""
    return (
        interval(row["times_faster_than_best_straight"])
        + reached
        + (", no kernels" if "without_kernels" in row else "")
    )


def mask_free_table(results: dict[str, Any], costs: dict[str, Any], runners: tuple[str, ...] = CPU_RUNNERS[1:]) -> str:
    """Return the time with a mask / of the plain model, and the share of the roofline, for each model and batch.

    If the cores were far apart in some rounds, the share in the other rounds follows in brackets.
    """
    masked, shares = [name for name in runners if not name.endswith(":int8")], runners
    lines = []
    for family in dict.fromkeys((*results, *costs)):
        measured, of_twins = results.get(family, {}), costs.get(family, {})
        for batch in (key for key in ("1", "64") if key in measured or key in of_twins):
            rows, twins = measured.get(batch, {}), of_twins.get(batch, {})
            over = [_over_plain(twins.get(name, {})) for name in masked]
            share = [_share(row) if (row := row_of(rows, name)) else "" for name in shares]
            lines.append((f"{family}, {batch}", *over, *share))
    head = ("family, batch", *(f"masked / plain: {name}" for name in masked))
    return table((*head, *(f"share of the roofline: {name}" for name in shares)), lines)


def _over_plain(row: dict[str, Any]) -> str:
    return interval(row["over_plain"], 3) if "over_plain" in row else ""


def _share(row: dict[str, Any]) -> str:
    return f"{row['share_of_roofline']:.0%}" if "share_of_roofline" in row else ""


def served_table(results: dict[str, Any]) -> str:
    """Return for each runner the images a second in process, the server's share, and the highest rate."""
    lines = []
    for name, row in results["runtimes"].items():
        shares = [interval(row["share_of_in_process"][protocol]) for protocol in ("grpc", "http")]
        bests = [load["best"] for load in row.get("arrivals", [])]
        rates = [
            f"{best['rate']:,.0f}, {best['p99_ms']:.0f} ms" if best else "no rate within the bound" for best in bests
        ]
        lines.append((name, f"{row['cells'][0]['images_per_second']:,.0f}", *shares, *(rates or ["", ""])))
    head = ("runner", "images/s, in process", "gRPC: share", "HTTP: share")
    return table((*head, "gRPC: arrivals/s, p99", "HTTP: arrivals/s, p99"), lines)


def where_table(results: dict[str, Any]) -> str:
    """Return for each family, runner and chunk size the time, the share of each operator, and the mask cost."""
    lines = []
    for family, of_family in results["families"].items():
        for program, measured in of_family["programs"].items():
            for rows, chunk in measured["rows"].items():
                shares = [f"{ms / chunk['ms']:.0%}" if ms else "" for ms in chunk["spent_ms"].values()]
                reached = f"{chunk['products_at_best_ms'] / chunk['spent_ms']['products']:.0%}"
                cells = [f"{family}, {program}, {rows}", f"{chunk['ms']:.2f}", *shares, reached]
                cells.append(f"{chunk['mask_ms'] / chunk['ms']:.1%}" if "mask_ms" in chunk else "")
                cells.append(f"{sum(chunk['all_cores_ms'].values()):.2f}" if "all_cores_ms" in chunk else "")
                lines.append(cells)
    kinds = ("linear maps", "attention", "mask", "layout", "norms", "rest")
    head = ("family, runner, images", "ms", *kinds, "linear maps: share of the best rate", "cost of the mask")
    return table((*head, "ms on all cores"), lines)


def int8_chunk_table(results: dict[str, Any]) -> str:
    """Return for each family the parts of the time of int8 in the chunk of a large batch, on one core."""
    lines = []
    sign = "" if results["card"]["verdict"] == "VALID" else " †"
    for family, of_family in results["families"].items():
        rows = of_family["programs"]["openvino+kernels:int8"]["rows"]
        images = max(rows, key=int)
        chunk = rows[images]
        total, spent, best = chunk["ms"], chunk["spent_ms"], chunk["products_at_best_ms"]
        others = total - spent["products"] - spent["attention"]
        faster = total - spent["products"] + best
        lines.append(
            (
                f"{family}, {images}",
                f"{total:.2f}{sign}",
                f"{spent['products'] / total:.0%}",
                f"{best / spent['products']:.0%}",
                f"{spent['attention'] / total:.0%}",
                f"{others / total:.0%}",
                f"{total / faster:.2f}",
            )
        )
    head = ("family, images", "ms", "linear maps", "their share of the best rate", "attention", "norms, layout, rest")
    return table((*head, "gain if linear maps ran at the best rate"), lines)


def policy_table() -> str:
    """Return the precision policy as a table with a row for the roles of the same types."""
    from gmmvit_deploy.inference.precision import PRECISIONS, ROLES, element_type

    roles: dict[tuple[str, ...], list[str]] = {}
    for role in ROLES:
        if role != "shape":  # indices and sizes have integer types
            roles.setdefault(tuple(element_type(role, p) for p in PRECISIONS), []).append(f"`{role}`")
    return table(("roles", *PRECISIONS), [(", ".join(names), *kinds) for kinds, names in roles.items()])


def masked_attention_table(attentions: dict[str, Any]) -> str:
    """Return the time of each program / the time of ``plain``, a row for each shape and data type."""
    programs = [name for name in next(iter(attentions.values())) if name != "plain"]
    rows = [
        (name, f"{row['plain']['ms']:.3f}", *(interval(row[program]["over_plain"]) for program in programs))
        for name, row in attentions.items()
    ]
    return table(("shape, data type", "plain, ms", *programs), rows)
