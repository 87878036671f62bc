"""Make the tables of the measurements that determined settings."""

from __future__ import annotations

from typing import Any

from benchmarks.shared.results import interval, result

__all__ = ["SHOWN", "documented_tables"]

SHOWN = {
    "cpu_settings": ("cpu_settings",),
    "spinning": ("spinning",),
    "kernel_tails": ("kernel_tails",),
    "one_image_openvino": ("one_image_openvino",),
}
"""Script → markers of the script's tables on the page of results."""


def documented_tables() -> dict[str, str]:
    """Return name of a marker in the documentation → the table at this marker."""
    return {
        "cpu_settings": chunks_table(result("settings/cpu_settings")),
        "spinning": spinning_table(result("settings/spinning")),
        "kernel_tails": tails_table(result("settings/kernel_tails")),
        "one_image_openvino": one_image_table(result("settings/one_image_openvino")),
    }


def one_image_table(results: dict[str, Any]) -> str:
    """Return a table with a row for each network and type: time of each setting / time of the runner."""
    networks = {
        f"{family}, {precision}": rows
        for family, by_precision in results["families"].items()
        for precision, rows in by_precision.items()
    }
    settings = dict.fromkeys(name for rows in networks.values() for name in rows if name != "runner")
    lines = [f"| network, type | runner, ms | {' | '.join(settings)} | bound |", "|---" * (3 + len(settings)) + "|"]
    for name, rows in networks.items():
        cells = [interval(rows[setting]["over_runner"]) if setting in rows else "" for setting in settings]
        bound = interval(rows["one thread"]["bound"])
        lines.append(f"| {name} | {rows['runner']['ms']:.2f} | {' | '.join(cells)} | {bound} |")
    return "\n".join(lines)


def tails_table(results: dict[str, Any]) -> str:
    """Return a table with a row for each size: time as it is / time padded, in each instruction set."""
    sets = results["sets"]
    lines = [f"| size | padded to | {' | '.join(sets)} |", "|---" * (2 + len(sets)) + "|"]
    for size, first in next(iter(sets.values())).items():
        cells = [interval(rows[size]["as_it_is_over_padded"]) for rows in sets.values()]
        lines.append(f"| {size} | {first['padded_to']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def chunks_table(results: dict[str, Any]) -> str:
    """Return a table with a row for each chunk size: time / time of ONNX Runtime with the whole batch at once."""
    programs = results["programs"]
    sizes = dict.fromkeys(name.split(", ")[1] for name in programs if name != "onnxruntime, whole")
    columns = [(runtime, at_once) for runtime in ("onnxruntime", "openvino") for at_once in (1, 2)]
    names = ["images in a chunk", *(f"{a}, {b} chunk{'s' * (b > 1)} at once" for a, b in columns)]
    lines = [f"| {' | '.join(names)} |", "|---" * (len(columns) + 1) + "|"]
    for size in sizes:
        cells = [interval(programs[f"{a}, {size}, {b} at once"]["over_whole"]) for a, b in columns]
        lines.append(f"| {size.removesuffix(' rows')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spinning_table(results: dict[str, Any]) -> str:
    """Return a table with a row for each spinning time: time of an image / time of an image with the default."""
    lines = [
        "| spinning time | one model, ms | one model / default | two models in turn / default "
        "| processor time after, ms |",
        "|---" * 5 + "|",
    ]
    for name, row in results["settings"].items():
        over = [interval(row[f"{column}_over_default"]) for column in ("alone", "beside")]
        spinning = "no spinning" if name == "none" else name
        lines.append(f"| {spinning} | {row['alone_ms']:.2f} | {' | '.join(over)} | {row['spent_after_ms']:.0f} |")
    return "\n".join(lines)
