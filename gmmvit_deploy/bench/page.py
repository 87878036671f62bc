"""Write the JSON result of a benchmark as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gmmvit_deploy.bench.report import MAX_OTHERS, MAX_SPREAD
from gmmvit_deploy.reports.pages import Plot, Summary, VerdictWord, figure, rendered, written_page
from gmmvit_deploy.reports.plotting import bar_style, figure_and_axes, line_style, svg

Result = Mapping[str, Any]


def write_page(result: Result, path: Path, *, force: bool = False) -> None:
    """Write the page of a result to ``path``.  result: as for `page_of`.  Errors: as for `written_page`."""
    written_page(page_of(result), path, force=force)


def page_of(result: Result) -> str:
    """Return the page as HTML.  result: as `BenchReport.to_json` returns it."""
    name = Path(str(result["bundle"]["path"])).name
    return rendered(
        "bench/page.html",
        title=f"Speed of {name}: {result['bundle']['model']}",
        summary=summary_of(result),
        figures=_figures(result),
        cells=_cells(result),
        ratios=[
            (
                f"{ratio['runner']} / {ratio['over']}",
                ratio["scenario"],
                str(ratio["batch"]),
                f"{ratio['value']:.3f}",
                f"{ratio['low']:.3f} to {ratio['high']:.3f}",
            )
            for ratio in result["ratios"]
        ],
        steps=[
            (
                step["name"],
                f"{step['ms']:.3f}",
                ", ".join(f"{name} {ms:.3f}" for name, ms in step["parts"].items()),
            )
            for step in result["waterfall"]
        ],
        loads=list(map(_load, result["loads"])),
        skipped=result["skipped"],
        card=_card(result),
    )


def summary_of(result: Result) -> Summary:
    """Return the summary of a result.  result: the result, as `BenchReport.to_json` returns it."""
    if result["reasons"]:
        count = len(result["reasons"])
        wrong = [cell for cell in result["cells"] if not cell["outputs"]["right"]]
        answers = "; some answers were wrong" if wrong else ""
        sentence = f"Do not quote these numbers: the run is invalid for {count} reason{'s' * (count > 1)}{answers}."
        return Summary(
            outcome="failed", word=result["verdict"], sentence=sentence, changes=(*result["reasons"], *_scope(result))
        )
    return Summary(
        outcome="passed",
        word=result["verdict"],
        sentence=f"These numbers may be quoted with their run card. {_fastest(result)}",
        changes=(*_nearest_limits(result), *_open_comparisons(result), *_scope(result)),
    )


def _fastest(result: Result) -> str:
    timed = [cell for cell in result["cells"] if cell["scenario"] != "Offline"]
    sentences = []
    if timed:
        batch = min(cell["batch"] for cell in timed)
        fastest = min((cell for cell in timed if cell["batch"] == batch), key=lambda cell: cell["median_ms"])
        sentences.append(f"Lowest median latency at batch {batch}: {fastest['runner']}, {fastest['median_ms']:.3f} ms.")
    if result["cells"]:
        highest = max(result["cells"], key=lambda cell: cell["samples_per_second"])
        sentences.append(
            f"Highest throughput: {highest['runner']}, {highest['samples_per_second']:,.0f} images a second "
            f"({highest['scenario']}, batch {highest['batch']})."
        )
    return " ".join(sentences)


def _nearest_limits(result: Result) -> Iterator[str]:
    if result["cells"]:
        widest = max(result["cells"], key=lambda cell: cell["spread"])
        yield (
            f"The largest spread of rounds is {widest['spread']:.0%} of their median, for {widest['runner']}, "
            f"{widest['scenario']}, batch {widest['batch']}; above {MAX_SPREAD:.0%} the run is invalid"
        )
    others = max(result[when]["others"] for when in ("before", "after"))
    yield f"Other programs took {others:.0%} of the machine; above {MAX_OTHERS:.0%} the run is invalid"


def _open_comparisons(result: Result) -> Iterator[str]:
    for ratio in result["ratios"]:
        if ratio["low"] <= 1 <= ratio["high"]:
            yield (
                f"{ratio['runner']} and {ratio['over']} are not shown to differ in {ratio['scenario']}, "
                f"batch {ratio['batch']} (ratio {ratio['low']:.3f} to {ratio['high']:.3f}); "
                "more --rounds make this interval narrower"
            )


def _scope(result: Result) -> Iterator[str]:
    if count := len(result["skipped"]):
        yield f"{count} measurement{'s were' if count > 1 else ' was'} skipped; the reasons are listed below"
    yield "The numbers only hold for the machine, bundle, settings and versions in the run card below"


def _figures(result: Result) -> list[Plot]:
    timed = [cell for cell in result["cells"] if cell["scenario"] != "Offline"]
    figures = []
    for batch in sorted({cell["batch"] for cell in timed}):
        chosen = [cell for cell in timed if cell["batch"] == batch]
        what = "The curves contain every query of every round."
        figures.append(figure(_latency_plot(chosen), f"Latency, batch {batch}", what))
    if len({cell["batch"] for cell in timed}) > 1:
        what = "The throughput is computed from the median latency."
        figures.append(figure(_throughput_plot(timed), "Throughput against batch", what))
    if result["shares"]:
        lines = "; ".join(map(roofline_words, result["rooflines"]))
        what = f"The rooflines were measured in this run: {lines}."
        figures.append(figure(_roofline_plot(result["shares"]), "Share of the roofline", what))
    what = "Unexplained is the time that the server's statistics do not contain."
    figures.append(figure(_waterfall_plot(result["waterfall"]), "Where the time goes", what))
    if result["loads"]:
        what = "Queries arrive at random times (Poisson). A latency counts from the query's scheduled time."
        figures.append(figure(_load_plot(result["loads"]), "Latency against load", what))
    return figures


def _cells(result: Result) -> list[tuple[str | VerdictWord, ...]]:
    shares = {(share["runner"], share["batch"]): share["share"] for share in result["shares"]}
    rows = []
    for cell in result["cells"]:
        timed = cell["scenario"] != "Offline"
        share = shares.get((cell["runner"], cell["batch"])) if timed else None
        outputs = cell["outputs"]
        rows.append(
            (
                cell["runner"],
                cell["scenario"],
                str(cell["batch"]),
                f"{cell['median_ms']:.3f}" if timed else "",
                f"{cell['spread']:.0%}",
                *(percentile_words(cell, name) for name in ("p90", "p99", "p99.9")),
                f"{cell['samples_per_second']:,.0f}",
                f"{share:.0%}" if share is not None else "",
                f"{outputs['answers']:,} within {outputs['limit']:.1e} of PyTorch"
                if outputs["right"]
                else VerdictWord("failed", "WRONG"),
            )
        )
    return rows


def _load(load: Mapping[str, Any]) -> tuple[str, ...]:
    best = load["best"]
    return (
        load["runner"],
        f"{load['bound_ms']:g} ms",
        f"{best['rate']:,.0f} a second" if best else "no tested rate stays within the bound",
        f"{best['p99_ms']:.2f} ms for {best['queries']:,} queries" if best else "",
    )


def _card(result: Result) -> dict[str, str]:
    machine, bundle = result["machine"], result["bundle"]
    return {
        "bundle": f"{bundle['path']}, SHA-256 {bundle['sha256']}",
        "checkpoint": f"{bundle['checkpoint']['name']}, SHA-256 {bundle['checkpoint']['sha256']}",
        "data": f"{result['data']['name']}, {result['data']['samples']} samples, SHA-256 {result['data']['sha256']}",
        "processor": f"{machine['cpu']}, {machine['cores_allowed']} cores, {', '.join(machine['features'])}",
        "GPUs": "; ".join(machine["gpus"]) or "no GPU",
        "system": f"{machine['system']}, {machine['memory_gib']} GiB",
        "environment": ", ".join(f"{name}={value}" for name, value in machine["environment"].items()) or "nothing set",
        "settings": ", ".join(f"{name} {value}" for name, value in result["settings"].items()),
        "before": _state(result["before"]),
        "after": _state(result["after"]),
        **{
            f"runner {name}": ", ".join(f"{what} {value}" for what, value in notes.items())
            for name, notes in result["runners"].items()
        },
        "versions": ", ".join(f"{name} {version}" for name, version in result["versions"].items()),
    }


def _state(state: Mapping[str, Any]) -> str:
    clocks = ", ".join(f"{value:.0f} MHz" for value in state["megahertz"][:4])
    gpus = "".join(
        f", GPU {gpu['megahertz']:.0f} MHz, {gpu['used']:.0%}, {gpu['celsius']:.0f} °C" for gpu in state["gpus"]
    )
    return (
        f"load {state['load']:.2f}, other programs {state['others']:.0%}, hypervisor {state['stolen']:.0%}, "
        f"fixed computation {state['spin_ms']:.2f} ms{', ' + clocks if clocks else ''}{gpus}"
    )


def percentile_words(cell: Mapping[str, Any], name: str) -> str:
    """Format a percentile of a cell, such as ``p99``: the ms, or the number of queries that are missing."""
    percentile = cell["percentiles"].get(name)
    if percentile is None:
        return ""
    if percentile["ms"] is None:
        return f"{percentile['missing_queries']:,} queries short"
    return f"{percentile['ms']:.3f}"


def roofline_words(line: Mapping[str, Any]) -> str:
    """Format a roofline: precision, device, highest rate, library and shape of this rate, and bandwidth."""
    shape = "×".join(map(str, line["shape"]))
    return (
        f"{line['precision']} on the {line['device']}: {line['gflops']:.0f} GFLOP/s ({line['library']}, {shape}), "
        f"{line['bandwidth_gb_s']:.0f} GB/s"
    )


# ---- plots ---------------------------------------------------------------------------------------------------------


def _latency_plot(cells: Sequence[Mapping[str, Any]]) -> str:
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


def _throughput_plot(cells: Sequence[Mapping[str, Any]]) -> str:
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


def _load_plot(loads: Sequence[Mapping[str, Any]]) -> str:
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


def _waterfall_plot(steps: Sequence[Mapping[str, Any]]) -> str:
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


def _roofline_plot(shares: Sequence[Mapping[str, Any]]) -> str:
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
