"""A benchmark as one self-contained page, made of its JSON result alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from gmmvit_deploy.bench.plots import latency_plot, load_plot, roofline_plot, throughput_plot, waterfall_plot
from gmmvit_deploy.bench.words import percentile_words, roofline_words
from gmmvit_deploy.pages import definitions, figure, page, table, written_page

__all__ = ["page_of", "write_page"]

_STYLE = """
.verdict { font-weight: 600; } .VALID { color: #1b6e2f; } .INVALID { color: #b00020; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); gap: 1rem; }
.plots svg { width: 100%; height: auto; }
"""
Result = Mapping[str, Any]


def write_page(result: Result, path: Path, *, force: bool = False) -> None:
    """Errors: as `written_page`."""
    written_page(page_of(result), path, force=force)


def page_of(result: Result) -> str:
    """result: as `BenchReport.to_json` gives it.  Nothing on the page is fetched from elsewhere."""
    name = Path(str(result["bundle"]["path"])).name
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in result["reasons"])
    body = [
        f"<h1>Speed of {escape(name)}: {escape(result['bundle']['model'])}</h1>",
        f'<p class="verdict {result["verdict"]}">{result["verdict"]}</p><ul>{reasons}</ul>',
        "<h2>Side by side</h2>",
        _cells(result),
        f'<div class="plots">{"".join(_figures(result))}</div>',
        _ratios(result["ratios"]),
        _steps(result["waterfall"]),
        _loads(result["loads"]),
        _list("Skipped", result["skipped"]),
        "<h2>Run card</h2>",
        definitions(_card(result)),
    ]
    return page(f"Speed of {name}", "".join(body), style=_STYLE)


def _list(title: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>{title}</h2><ul>{items}</ul>" if lines else ""


def _figures(result: Result) -> list[str]:
    timed = [cell for cell in result["cells"] if cell["scenario"] != "Offline"]
    found = []
    for batch in sorted({cell["batch"] for cell in timed}):
        chosen = [cell for cell in timed if cell["batch"] == batch]
        found.append(figure(latency_plot(chosen), f"Latency, batch {batch}", "Every query of every round."))
    if len({cell["batch"] for cell in timed}) > 1:
        found.append(figure(throughput_plot(timed), "Throughput against batch", "Of the median latency."))
    if result["shares"]:
        lines = "; ".join(map(roofline_words, result["rooflines"]))
        found.append(figure(roofline_plot(result["shares"]), "Share of the roofline", f"Measured here: {lines}."))
    if result["waterfall"]:
        what = "What a server does not account for is shown as unexplained."
        found.append(figure(waterfall_plot(result["waterfall"]), "Where the time goes", what))
    if result["loads"]:
        what = "Poisson arrivals; latency from the scheduled time."
        found.append(figure(load_plot(result["loads"]), "Latency against load", what))
    return found


def _cells(result: Result) -> str:
    shares = {(one["runner"], one["batch"]): one["share"] for one in result["shares"]}
    rows = []
    for cell in result["cells"]:
        timed = cell["scenario"] != "Offline"
        share = shares.get((cell["runner"], cell["batch"])) if timed else None
        outputs = cell["outputs"]
        rows.append(
            (
                escape(cell["runner"]),
                cell["scenario"],
                str(cell["batch"]),
                f"{cell['median_ms']:.3f}" if timed else "",
                f"{cell['spread']:.0%}",
                *(percentile_words(cell, name) for name in ("p90", "p99", "p99.9")),
                f"{cell['samples_per_second']:,.0f}",
                f"{share:.0%}" if share is not None else "",
                f"{outputs['answers']:,} within {outputs['limit']:.1e}" if outputs["right"] else "WRONG",
            )
        )
    head = (
        "runner",
        "scenario",
        "batch",
        "median ms",
        "spread",
        "p90",
        "p99",
        "p99.9",
        "images/s",
        "roofline",
        "answers",
    )
    return table(head, rows)


def _ratios(ratios: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            f"{escape(one['runner'])} over {escape(one['over'])}",
            one["scenario"],
            str(one["batch"]),
            f"{one['median']:.3f}",
            f"{one['low']:.3f} to {one['high']:.3f}",
        )
        for one in ratios
    ]
    head = ("time", "scenario", "batch", "ratio", "95 % interval")
    return f"<h2>Ratios</h2>{table(head, rows)}" if rows else ""


def _steps(steps: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            escape(step["name"]),
            f"{step['ms']:.3f}",
            f"{step['over_before']:+.3f}" if index else "",
            escape(", ".join(f"{name} {ms:.3f}" for name, ms in step["parts"].items())),
        )
        for index, step in enumerate(steps)
    ]
    head = ("step", "ms", "more than the step before", "of a server's request")
    return f"<h2>Where the time of one image goes</h2>{table(head, rows)}" if rows else ""


def _loads(loads: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for load in loads:
        best = load["best"]
        rows.append(
            (
                escape(load["runner"]),
                f"{load['bound_ms']:g} ms",
                f"{best['rate']:,.0f} a second" if best else "none that was tried",
                f"{best['p99_ms']:.2f} ms on {best['queries']:,} queries" if best else "",
            )
        )
    head = ("runner", "p99 below", "highest rate", "p99 there")
    return f"<h2>Arrivals that it takes</h2>{table(head, rows)}" if rows else ""


def _card(result: Result) -> dict[str, str]:
    machine, bundle = result["machine"], result["bundle"]
    return {
        "bundle": f"{bundle['path']}, SHA-256 {bundle['sha256']}",
        "checkpoint": f"{bundle['checkpoint']['name']}, SHA-256 {bundle['checkpoint']['sha256']}",
        "data": f"{result['data']['name']}, {result['data']['samples']} samples, SHA-256 {result['data']['sha256']}",
        "processor": f"{machine['cpu']}, {machine['cores_allowed']} cores, {', '.join(machine['features'])}",
        "GPUs": "; ".join(machine["gpus"]) or "none",
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
        f"load {state['load']:.2f}, others {state['others']:.0%}, stolen {state['stolen']:.0%}, "
        f"fixed work {state['spin_ms']:.2f} ms{', ' + clocks if clocks else ''}{gpus}"
    )
