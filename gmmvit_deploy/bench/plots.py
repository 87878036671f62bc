"""The pictures on a benchmark's page, as SVG; every one is made of the JSON result alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gmmvit_deploy.plotting import COLOURS, figure_and_axes, svg

__all__ = ["latency_plot", "load_plot", "roofline_plot", "throughput_plot", "waterfall_plot"]

Cells = Sequence[Mapping[str, Any]]


def latency_plot(cells: Cells) -> str:
    """Share of queries that took no longer than this, one curve a runner: the tail is to the right."""
    figure, axes = figure_and_axes(height=3.8)
    for colour, cell in zip(_colours(cells), cells, strict=True):
        ordered = np.sort(np.asarray(cell["latencies_ms"]))
        axes.step(ordered, 1 - np.arange(len(ordered)) / len(ordered), where="post", color=colour, label=cell["runner"])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("latency, ms")
    axes.set_ylabel("share of queries that took longer")
    axes.legend(frameon=False, fontsize=8)
    return svg(figure)


def throughput_plot(cells: Cells) -> str:
    """Samples a second against batch."""
    figure, axes = figure_and_axes(height=3.6)
    runners = list(dict.fromkeys(cell["runner"] for cell in cells))
    for colour, runner in zip(COLOURS, runners, strict=False):
        own = sorted((cell["batch"], cell["samples_per_second"]) for cell in cells if cell["runner"] == runner)
        axes.plot([batch for batch, _ in own], [rate for _, rate in own], "o-", color=colour, label=runner)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({cell["batch"] for cell in cells}), [str(b) for b in sorted({c["batch"] for c in cells})])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch")
    axes.set_ylabel("images a second")
    axes.legend(frameon=False, fontsize=8)
    return svg(figure)


def load_plot(loads: Sequence[Mapping[str, Any]]) -> str:
    """p99 against the rate of arrivals, and the bound."""
    figure, axes = figure_and_axes(height=3.6)
    for colour, load in zip(COLOURS, loads, strict=False):
        points = load["points"]
        rates, latencies = [point["rate"] for point in points], [point["p99_ms"] for point in points]
        axes.plot(rates, latencies, "o-", color=colour, label=load["runner"])
    axes.axhline(loads[0]["bound_ms"], ls="--", color="#555", label=f"bound, {loads[0]['bound_ms']:g} ms")
    axes.set_yscale("log")
    axes.set_xlabel("arrivals a second")
    axes.set_ylabel("p99, ms")
    axes.legend(frameon=False, fontsize=8)
    return svg(figure)


def waterfall_plot(steps: Sequence[Mapping[str, Any]]) -> str:
    """One bar a step; a server's bar is cut into what it accounts for and the rest."""
    figure, axes = figure_and_axes(height=0.5 * len(steps) + 1)
    labels: set[str] = set()
    for row, step in enumerate(steps):
        parts: dict[str, float] = {} if step["parts"] else {"in this process": step["ms"]}
        for name, ms in step["parts"].items():
            parts[_part(name)] = parts.get(_part(name), 0.0) + ms
        left = 0.0
        for name, ms in parts.items():
            colour = COLOURS[_PARTS.index(name) % len(COLOURS)]
            axes.barh(row, ms, left=left, color=colour, label=None if name in labels else name)
            labels.add(name)
            left += ms
    axes.set_yticks(range(len(steps)), [step["name"] for step in steps])
    axes.invert_yaxis()
    axes.set_xlabel("ms for one image")
    axes.legend(frameon=False, fontsize=8)
    return svg(figure)


def roofline_plot(shares: Sequence[Mapping[str, Any]]) -> str:
    """Each runner and batch as a share of what this machine allows."""
    figure, axes = figure_and_axes(height=0.3 * len(shares) + 1)
    names = [f"{one['runner']}, batch {one['batch']}" for one in shares]
    axes.barh(names, [100 * one["share"] for one in shares], color=COLOURS[0])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the measured roofline, %")
    return svg(figure)


_PARTS = ("in this process", "queue", "input", "infer", "output", "decoding", "unexplained")


def _part(name: str) -> str:
    """``gmmvit_network infer`` → infer; all that happens in the preprocessing model is decoding."""
    return "decoding" if "_preprocess " in name else name.rpartition(" ")[2]


def _colours(cells: Cells) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(len(cells))]
