"""Make the tables of machines and start-up: the capacity plan, the model of the cores, and the first useful output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.shared.results import interval
from gmmvit_deploy.manifests.plan import machines_for

__all__ = ["capacity_table", "core_model_table", "first_output_table", "machines_table"]

_LOADS = (100, 1_000, 10_000)
_PARTS = 5
_LEAST_S = 0.05


def capacity_table(result: Mapping[str, Any]) -> str:
    """Return a table with a row for each number of servers and utilisation: latency, and the error of the model."""
    lines = [
        "| servers | requests/s | utilisation | mean, measured | mean, model / measured "
        "| mean, same arrivals / measured | p99, measured | p99, model / measured | p99, same arrivals / measured |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = [row["servers"], f"{row['rate']:.0f}", f"{row['utilisation']:.0%}"]
        for name in ("mean_ms", "p99_ms"):
            seen = row["seen"][name]
            cells += [f"{seen:.1f} ms", *(f"{row[given][name] / seen:.2f}" for given in ("model", "same_arrivals"))]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def machines_table(served: Mapping[str, Any]) -> str:
    """Return a table with the machines that a load needs, for each measured runtime and protocol.

    served: the result of ``served.py``, with the highest rate of a machine within the latency limit.
    """
    loads = " | ".join(f"{load:,}/s" for load in _LOADS)
    lines = [f"| network | protocol | requests/s of a machine | {loads} |", "|---" * (3 + len(_LOADS)) + "|"]
    for name, row in served["runtimes"].items():
        for arrivals, protocol in zip(row.get("arrivals", []), ("gRPC", "HTTP"), strict=False):
            if not arrivals["best"]:
                continue
            rate = arrivals["best"]["rate"]
            machines = " | ".join(str(machines_for(load, rate)) for load in _LOADS)
            lines.append(f"| {name} | {protocol} | {rate:.0f} | {machines} |")
    return "\n".join(lines)


def core_model_table(result: Mapping[str, Any]) -> str:
    """Return a table with the error of the model on two cores, and its unchecked predictions for more cores."""
    lines = [
        "| runtime | two cores: image, predicted / measured | batch of 64 | two instances "
        "| 4, 8, 16, 64 cores, unchecked: images/s in batches | best number of instances "
        "| one image at once: best number of instances / one instance |",
        "|---|---|---|---|---|---|---|",
    ]
    for runtime, row in result["runtimes"].items():
        errors = [
            interval(row["two_cores"][name]["predicted_over_measured"]) for name in ("image", "batch", "instances")
        ]
        more = row["more_cores"].values()
        rates = ", ".join(f"{each['batch_rate']:.0f}" for each in more)
        instances = ", ".join(str(each["best_instances"]) for each in more)
        gains = ", ".join(f"{each['best_over_one_instance']:.1f}" for each in more)
        lines.append(f"| {runtime} | {' | '.join(errors)} | {rates} | {instances} | {gains} |")
    return "\n".join(lines)


def first_output_table(result: Mapping[str, Any]) -> str:
    """Return a table with a row for each command: seconds, the ratio after / before, and the largest parts.

    ``serve`` has no parts: its parts run on until the server is stopped.
    """
    lines = ["| command | seconds | after / before | largest parts | computed twice |", "|---|---|---|---|---|"]
    for command, row in result["commands"].items():
        after = row["after"]
        parts = sorted(after["parts"].items(), key=lambda item: -item[1])[:_PARTS]
        large = [f"{name} {seconds:.1f} s" for name, seconds in parts if seconds >= _LEAST_S]
        words = "" if command == "serve" else ", ".join(large)
        before = interval(row["ratio"]) if "ratio" in row else ""
        twice = ", ".join(sorted({name.rpartition(" ")[0] for name in after["repeated"]})) or "nothing"
        lines.append(f"| `{command}` | {after['seconds']:.1f} | {before} | {words} | {twice} |")
    return "\n".join(lines)
