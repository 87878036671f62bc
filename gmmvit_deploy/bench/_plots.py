"""Draw the plots of a benchmark's page as SVG.  Each plot is drawn from the JSON result only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gmmvit_deploy.reports.plotting import bar_style, figure_and_axes, line_style, svg

Cells = Sequence[Mapping[str, Any]]


def latency_plot(cells: Cells) -> str:
    """Plot a curve for each runner: the share of queries whose latency is longer than the latency on the x axis."""
    figure, axes = figure_and_axes(height=3.8)
    for number, cell in enumerate(cells):
        ordered = np.sort(np.asarray(cell["latencies_ms"]))
        longer = 1 - np.arange(len(ordered)) / len(ordered)
        axes.step(ordered, longer, where="post", label=cell["runner"], **line_style(number))
    axes.set(xscale="log", yscale="log", xlabel="latency, ms", ylabel="share of queries that took longer")
    axes.legend(frameon=False, fontsize=8)
    slowest = [f"{cell['runner']}: median {cell['median_ms']:.3f} ms, {_slowest(cell)}" for cell in cells]
    what = "A curve for each runner: the share of queries that took longer than a latency."
    return svg(figure, f"{what} {'; '.join(slowest)}.")


def _slowest(cell: Mapping[str, Any]) -> str:
    return f"slowest query {max(cell['latencies_ms']):.3f} ms" if cell["latencies_ms"] else "no latencies"


def throughput_plot(cells: Cells) -> str:
    """Plot a curve for each runner: the samples a second against the batch size."""
    figure, axes = figure_and_axes(height=3.6)
    runners = list(dict.fromkeys(cell["runner"] for cell in cells))
    lines = []
    for number, runner in enumerate(runners):
        own = sorted((cell["batch"], cell["samples_per_second"]) for cell in cells if cell["runner"] == runner)
        batches, rates = [batch for batch, _ in own], [rate for _, rate in own]
        axes.plot(batches, rates, label=runner, **line_style(number, marker=True))
        points = ", ".join(f"{rate:,.0f} at batch {batch}" for batch, rate in own)
        lines.append(f"{runner}: {points}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({cell["batch"] for cell in cells}), [str(b) for b in sorted({c["batch"] for c in cells})])
    axes.set(ylim=(0, None), xlabel="batch", ylabel="images a second")
    axes.legend(frameon=False, fontsize=8)
    return svg(figure, f"A curve for each runner: images a second at each batch size. {'; '.join(lines)}.")


def load_plot(loads: Sequence[Mapping[str, Any]]) -> str:
    """Plot a curve for each runner, the p99 latency against the arrival rate, and a line at the latency's bound."""
    figure, axes = figure_and_axes(height=3.6)
    lines = []
    for number, load in enumerate(loads):
        points = sorted(load["points"], key=lambda point: point["rate"])
        rates, latencies = [point["rate"] for point in points], [point["p99_ms"] for point in points]
        axes.plot(rates, latencies, label=load["runner"], **line_style(number, marker=True))
        shown = ", ".join(f"{p99:.2f} ms at {rate:,.0f}" for rate, p99 in zip(rates, latencies, strict=True))
        lines.append(f"{load['runner']}: {shown}")
    bound = f"bound, {loads[0]['bound_ms']:g} ms"
    axes.axhline(loads[0]["bound_ms"], ls=(0, (1, 3)), color="#000000", label=bound)
    axes.set(yscale="log", xlabel="arrivals a second", ylabel="p99 latency, ms")
    axes.legend(frameon=False, fontsize=8)
    what = f"A curve for each runner: the p99 latency at each rate of arrivals a second; {bound}."
    return svg(figure, f"{what} {'; '.join(lines)}.")


def waterfall_plot(steps: Sequence[Mapping[str, Any]]) -> str:
    """Plot a bar for each step.  A server's bar is divided into parts of the server's time and the unexplained rest."""
    figure, axes = figure_and_axes(height=0.5 * len(steps) + 1)
    labels: set[str] = set()
    for row, step in enumerate(steps):
        parts: dict[str, float] = {} if step["parts"] else {"in this process": step["ms"]}
        for name, ms in step["parts"].items():
            parts[_part(name)] = parts.get(_part(name), 0.0) + ms
        left = 0.0
        for name, ms in parts.items():
            label = None if name in labels else name
            axes.barh(row, ms, left=left, label=label, **bar_style(_PARTS.index(name)))
            labels.add(name)
            left += ms
    axes.set_yticks(range(len(steps)), [step["name"] for step in steps])
    axes.invert_yaxis()
    axes.set_xlabel("ms for a single image")
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    shown = "; ".join(f"{step['name']}: {step['ms']:.3f} ms" for step in steps)
    return svg(figure, f"A bar for each step: the time of a single image. {shown}.")


def roofline_plot(shares: Sequence[Mapping[str, Any]]) -> str:
    """Plot a bar for each runner and batch size: the runner's share of the roofline (`bench.roofline`)."""
    figure, axes = figure_and_axes(height=0.3 * len(shares) + 1)
    names = [f"{share['runner']}, batch {share['batch']}" for share in shares]
    axes.barh(names, [100 * share["share"] for share in shares], **bar_style(0))
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="share of the measured roofline, %")
    shown = "; ".join(f"{name}: {share['share']:.0%}" for name, share in zip(names, shares, strict=True))
    return svg(figure, f"A bar for each runner and batch size: the share of the measured roofline. {shown}.")


_PARTS = ("in this process", "queue", "input", "infer", "output", "decoding", "unexplained")


def _part(name: str) -> str:
    """Return ``infer`` for ``gmmvit_network infer``, and ``decoding`` for every part of the preprocessing model."""
    return "decoding" if "_preprocess " in name else name.rpartition(" ")[2]
