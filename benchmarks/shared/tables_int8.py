"""Make the page that compares int8 of this project with other projects' int8, and its plots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.shared.results import card_lines, cross_of, interval, table
from gmmvit_deploy.reports.plotting import figure_and_axes, line_style, svg

SETS = ("judged", "shifted", "aside")
_BATCHES = ("1", "16")
_JUDGED_WITHOUT_A_BATCH = "16"
_PLOTTED = "judged"
_BESIDE_CASCADES = {
    "straight openvino": "float32, OpenVINO",
    "straight openvino bf16": "bf16, OpenVINO",
    "ours fp32 openvino+kernels": "float32, ours",
    "ours bf16 openvino+kernels": "bf16, ours",
    "nncf_default openvino": "int8, NNCF",
    "nncf_accuracy openvino": "int8, NNCF with accuracy control",
    "ours static openvino+kernels": "int8, ours",
}


def int8_page(runs: Mapping[str, dict[str, Any]]) -> str:
    """Return the page: tables, plot, what is missing and run cards of each network.  runs: file → result."""
    lines = [
        "# int8 on real weights",
        "",
        "`python benchmarks/int8_real.py` measures how many decisions of the float32 network each int8 keeps, and how "
        "long it takes compared with float32; its first lines define the columns. *judged*: images like the "
        "calibration images. *shifted*: the same with blur, contrast, noise or other colours. *aside*: crops of "
        "photographs that calibrated nothing. Decisions kept without a batch were judged in batches of 16; times are "
        "those of batches that were judged. Intervals: each end is a one-sided 95 % bound for kept decisions and "
        "top-1, and 95 % for times.",
    ]
    for name, run in runs.items():
        if "programs" not in run:
            continue
        speed = runs.get(f"{name}.speed", {})
        lines += ["", f"## {name}", "", _tables(run, speed)]
        if speed:
            lines += ["", f"![Decisions kept against time](int8_real/{name}.svg)"]
        tools = {f"{tool} {version}" for versions in run["tools"].values() for tool, version in versions.items()}
        lines += ["", f"Quantised with {', '.join(sorted(tools)) or 'no tool of another project'}."]
        if run.get("minutes"):
            minutes = (f"{what} {spent:g}" for what, spent in run["minutes"].items())
            lines += ["", f"Minutes of quantisation: {', '.join(minutes)}."]
        if run["missing"]:
            lines += ["", *(f"- not measured: {program}: {reason}" for program, reason in run["missing"].items())]
        lines += ["", *card_lines(run["card"]), *(["", *card_lines(speed["card"])] if speed else [])]
    return "\n".join([*lines, ""])


def _tables(run: dict[str, Any], speed: dict[str, Any]) -> str:
    answers = [
        (
            name,
            kind,
            f"{row['kept']:.2%} ({row['kept_interval'][0]:.1%}–{row['kept_interval'][1]:.1%})"
            + "".join(f", batch {batch}: {kept:.2%}" for batch, kept in row.get("batches", {}).items()),
            f"{row['db']:.1f}" if row["db"] < 100 else "–",
            f"{row['least_cosine']:.4f}",
            f"{row['below_cosine']:.1%}",
            _top1(row),
            f"{row['changed_by_kernels']:.2%}" if "changed_by_kernels" in row else "",
        )
        for kind in SETS
        for name, sets in run["programs"].items()
        if (row := sets.get(kind))
    ]
    head = (
        "program",
        "images",
        "decisions kept",
        "dB",
        "least cosine",
        "below 0.98",
        "top-1",
        "changed by our kernels",
    )
    tables = table(head, answers)
    if not speed:
        return tables
    batches = _judged_batches(run)
    times = [
        (name, *(f"{interval(speed['batches'][batch][name]['time'])}{cross_of(speed, batch)}" for batch in batches))
        for name in speed["batches"][_JUDGED_WITHOUT_A_BATCH]
    ]
    tables = "\n\n".join([tables, table(("program", *(f"time / float32, batch {n}" for n in batches)), times)])
    on_images = speed.get("on_images")
    if not on_images:
        return tables
    rows = [
        (
            name,
            ", ".join(
                f"{kind} {row['deferred']:.1%}"
                for kind, row in run["programs"].get(name, {}).items()
                if "deferred" in row
            ),
            *(_on_images(on_images[batch][name]) for batch in _BATCHES),
        )
        for name in on_images[_BATCHES[0]]
    ]
    needed = [
        (kind, *(f"{share:.2%}" for share in row["needed"].values()))
        for kind, row in run["programs"].get("ours static openvino+kernels", {}).items()
        if "needed" in row
    ]
    measures = ("99.8 % kept: images to compute again, by", "margin of logits", "of probabilities", "over their spread")
    times_on_images = (f"time / float32 on images, batch {n}" for n in _BATCHES)
    return "\n\n".join(
        [
            tables,
            *([table(measures, needed)] if needed else []),
            table(("program", "computed again", *times_on_images), rows),
        ]
    )


def cascades_table(runs: Mapping[str, dict[str, Any]]) -> str:
    """Return the table of cascades beside the programs that they stand between.  runs: file → result."""
    rows = []
    for network, run in runs.items():
        speed = runs.get(f"{network}.speed", {"on_images": {}})
        for name, sets in run.get("programs", {}).items():
            if shown := _BESIDE_CASCADES.get(name, name if name.startswith("cascade") else ""):
                times = [(batch, of.get(name)) for batch, of in speed["on_images"].items()]
                rows.append(
                    (
                        network.replace("_", " "),
                        shown,
                        *(f"{sets[kind]['kept']:.2%}" for kind in SETS[:2]),
                        *(f"{sets[kind]['deferred']:.1%}" if "deferred" in sets[kind] else "" for kind in SETS[:2]),
                        *(f"{row['time']['value']:.2f}{cross_of(speed, batch)}" for batch, row in times if row),
                    )
                )
    head = ("network", "program", "kept", "kept, shifted", "again", "again, shifted", "time, 1", "time, 16")
    return table(head, [(*row, *[""] * (len(head) - len(row))) for row in rows])


def _on_images(row: dict[str, Any]) -> str:
    p99 = "" if row["p99_ms"] is None else f", 99 % within {row['p99_ms']:.1f} ms"
    return f"{interval(row['time'])}; mean {row['mean_ms']:.1f} ms{p99}"


def _judged_batches(run: dict[str, Any]) -> list[str]:
    """Return the batches in which the decisions were judged: a result without them was judged in batches of 16."""
    sets = [row for of_program in run["programs"].values() for row in of_program.values()]
    return list(_BATCHES) if all("batches" in row for row in sets) else [_JUDGED_WITHOUT_A_BATCH]


def _top1(row: dict[str, Any]) -> str:
    if "top1" not in row:
        return ""
    low, high = row["top1_interval"]
    return f"{row['top1']:.1%} ({100 * row['top1_difference']:+.2f}: {100 * low:+.2f} to {100 * high:+.2f})"


def int8_plot(run: dict[str, Any], speed: dict[str, Any], batch: str) -> str:
    """Return the SVG of a network: decisions kept of the judged images against the time at a batch size."""
    figure, axes = figure_and_axes(height=4.5)
    times = speed["batches"][batch]
    shown = {name: sets[_PLOTTED]["kept"] for name, sets in run["programs"].items() if name in times}
    for number, (name, kept) in enumerate(shown.items()):
        style = {**line_style(number, marker=True), "linestyle": "none"}
        axes.plot(times[name]["time"]["value"], 100 * kept, label=name, **style)
    axes.set_xlabel(f"time, divided by the time of the float32 straight export, batch {batch}")
    axes.set_ylabel("decisions kept, %")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    return svg(figure, f"Decisions kept against time at batch {batch}; the table has the values.")
