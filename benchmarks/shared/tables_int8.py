"""Make the page that compares int8 of this project with other projects' int8, and its plots."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from benchmarks.shared.results import card_lines, cross_of, interval, table
from gmmvit_deploy.reports.plotting import figure_and_axes, line_style, svg

SETS = ("judged", "shifted", "aside")
_BATCHES = ("1", "16")
_JUDGED_WITHOUT_A_BATCH = "16"
_PLOTTED = "judged"
_COMPARED = {
    "straight openvino": "float32, OpenVINO",
    "straight onnxruntime": "float32, ONNX Runtime",
    "aotinductor torch": "float32, AOTInductor",
    "ours fp32 openvino+kernels": "float32, ours",
    "straight openvino bf16": "bf16, OpenVINO",
    "ours bf16 openvino+kernels": "bf16, ours",
    "ort_static onnxruntime": "int8, ONNX Runtime, static",
    "ort_dynamic onnxruntime": "int8, ONNX Runtime, dynamic",
    "pt2e_static torch": "int8, PyTorch, static",
    "pt2e_dynamic torch": "int8, PyTorch, dynamic",
    "nncf_default openvino": "int8, NNCF",
    "nncf_accuracy openvino": "int8, NNCF with accuracy control",
    "ours static openvino+kernels": "int8, ours",
}
"""Program → its name in the tables of `compared_table`, in their order; cascades follow under their own names."""
FEW = (
    "ours fp32 openvino+kernels",
    "straight openvino bf16",
    "nncf_default openvino",
    "ours static openvino+kernels",
    "cascade 99.98 %",
)
"""The programs in the table of several networks."""


def int8_page(runs: Mapping[str, dict[str, Any]], folder: str) -> str:
    """Return the page: tables, plot, what is missing and run cards of each network.

    runs: file of the folder → result.
    """
    lines = [
        f"# int8 on real weights: {folder}",
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
            lines += ["", f"![Decisions kept against time]({folder}/{name}.svg)"]
        tools = {f"{tool} {version}" for versions in run["tools"].values() for tool, version in versions.items()}
        lines += ["", f"Tools of other projects: {', '.join(sorted(tools)) or 'none'}."]
        if run.get("minutes"):
            minutes = (f"{what} {spent:g}" for what, spent in run["minutes"].items())
            lines += ["", f"Minutes of quantisation or compilation: {', '.join(minutes)}."]
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


def compared_table(runs: Mapping[str, dict[str, Any]], networks: Sequence[str], *, only: Collection[str] = ()) -> str:
    """Return the table of programs, with cascades.  runs: file → result.  only: programs; empty means all."""
    rows = []
    for network in networks:
        run, speed = runs[network], runs[f"{network}.speed"]
        cascades = [name for name in run["programs"] if name.startswith("cascade")]
        for name, shown in {**_COMPARED, **dict(zip(cascades, cascades, strict=True))}.items():
            sets = run["programs"].get(name)
            timed = {batch: times[name] for batch, times in speed["on_images"].items() if name in times}
            if (only and name not in only) or (sets is None and not timed):
                continue
            minutes = run.get("minutes", {}).get(name.split(" ")[1 if name.startswith("ours") else 0])
            rows.append(
                (
                    *((network,) if len(networks) > 1 else ()),
                    shown,
                    *(_decisions(*(sets[kind] for kind in SETS[:2])) if sets is not None else [""] * 4),
                    *(_ratio(timed[batch], speed, batch) if batch in timed else "" for batch in _BATCHES),
                    "" if minutes is None else f"{minutes:g}",
                )
            )
    head = ("program", "kept", "kept, shifted", "top-1", "again", "time, 1", "time, 16", "minutes")
    return table(("network", *head) if len(networks) > 1 else head, rows)


def _decisions(judged: dict[str, Any], shifted: dict[str, Any]) -> tuple[str, ...]:
    """Return the shares kept of both sets, the top-1 of the first, and the shares that a cascade computes again."""
    again = f"{judged['deferred']:.1%}, {shifted['deferred']:.1%}" if "deferred" in judged else ""
    return (f"{judged['kept']:.2%}", f"{shifted['kept']:.2%}", f"{judged['top1']:.1%}", again)


def _ratio(row: dict[str, Any], speed: dict[str, Any], batch: str) -> str:
    return f"{row['time']['value']:.2f}{cross_of(speed, batch)}"


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
