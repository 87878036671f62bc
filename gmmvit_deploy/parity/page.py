"""A parity report as one self-contained page: for the person who signs, and for the one who looks it up later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from gmmvit_deploy.pages import definitions, figure, page, table, written_page
from gmmvit_deploy.parity.plots import block_plot, class_plot, margin_plot
from gmmvit_deploy.parity.report import ParityReport, RunnerReport
from gmmvit_deploy.parity.verdict import Check

__all__ = ["page_of", "write_page"]

_STYLE = """
td, th { text-align: left; vertical-align: top; white-space: nowrap; }
td:last-child { white-space: normal; min-width: 20rem; }
.verdict { font-weight: 600; } .passed { color: #1b6e2f; } .failed { color: #b00020; }
.undecided { color: #8a5a00; } .skipped { color: #555; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); gap: 1rem; }
.plots svg { width: 100%; height: auto; }
"""
_WORDS = {
    "passed": "Passed",
    "failed": "Failed",
    "undecided": "Nothing wrong was found, but not everything could be told",
}
_MOST_FLIPS = 200


def write_page(report: ParityReport, path: Path, *, force: bool = False) -> None:
    """Errors: as `written_page`."""
    written_page(page_of(report), path, force=force)


def page_of(report: ParityReport) -> str:
    """The HTML text.  Nothing in it is fetched from elsewhere."""
    name = Path(str(report.bundle["path"])).name
    body = [
        f"<h1>Parity of {escape(name)}: {escape(report.bundle['model'])}</h1>",
        f'<p class="verdict {report.verdict}">{_WORDS[report.verdict]}</p>',
        _failures(report),
        "<h2>Checks</h2>",
        _checks_table(report),
        *(_runner(runner) for runner in report.runners),
        _skipped(report),
        "<h2>What this speaks of</h2>",
        definitions(_provenance(report)),
        _broken(report.data),
    ]
    return page(f"Parity of {name}", "".join(body), style=_STYLE)


def _failures(report: ParityReport) -> str:
    lines = report.failures()
    return "<ul>" + "".join(f'<li class="failed">{escape(line)}</li>' for line in lines) + "</ul>" if lines else ""


def _checks_table(report: ParityReport) -> str:
    rows = [("bundle", "", check) for check in report.checks]
    rows += [(runner.runner, runner.precision, check) for runner in report.runners for check in runner.checks]
    cells = [
        (escape(who), escape(precision), escape(check.name), _verdict(check), escape(check.says))
        for who, precision, check in rows
    ]
    return table(("runner", "precision", "check", "verdict", "what was seen"), cells)


def _verdict(check: Check) -> str:
    return f'<span class="verdict {check.verdict}">{check.verdict}</span>'


def _runner(runner: RunnerReport) -> str:
    checks = {check.name: check for check in runner.checks}
    figures = [figure(margin_plot(*runner.points), "Margin against error", "One point an input, flips marked.")]
    blocks = checks["localize"].details.get("blocks") if "localize" in checks else None
    if blocks:
        looked = checks["localize"].details["looking_changed_logits_by"]
        what = f"{checks['localize'].says}. Looking inside changed the logits by {looked:.2g}."
        figures.append(figure(block_plot(blocks), "Error by block", what))
    accuracy = checks["accuracy"].details
    if accuracy:
        what = f"Top-1 on {accuracy['images']:,} images. {accuracy['classes']}"
        figures.append(figure(class_plot(accuracy["per_class"]), "Accuracy by class", what))
    return (
        f"<h2>{escape(runner.runner)}, {escape(runner.precision)}</h2>{definitions(dict(runner.provenance))}"
        f'<div class="plots">{"".join(figures)}</div>'
        f"{_numbers(checks['numeric'].details['sets'])}{_accuracy(accuracy)}{_flips(checks['decisions'].details)}"
    )


def _numbers(sets: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for one in sets:
        for name, found in (("float64", one["from_exact"]), ("float32", one["from_trained"])):
            numbers = [f"{found[key]:.2e}" for key in ("largest", "p99", "rms", "relative_l2")]
            cosine = f"1 − {1 - found['cosine']:.1e}"
            limit, why = (
                (f"{one['limit']['largest']:.2e}", one["limit"]["derivation"]) if name == "float64" else ("", "")
            )
            first = (escape(one["inputs"]), str(found["rows"]), name)
            rows.append((*first, *numbers, cosine, limit, escape(why)))
    head = ("inputs", "rows", "against", "largest", "99 %", "rms", "relative L2", "cosine", "limit", "derived as")
    return table(head, rows)


def _accuracy(details: Mapping[str, Any]) -> str:
    if not details:
        return ""
    rows = []
    for name in ("top1", "top5"):
        found = details[name]
        if found is not None:
            low, high = found["interval"]
            rows.append(
                (
                    name.replace("top", "top-"),
                    f"{found['pytorch']:.2%}",
                    f"{found['runner']:.2%}",
                    f"{found['difference']:+.2%}",
                    f"{low:+.2%} to {high:+.2%}",
                    f"{found['lost']}, {found['gained']}",
                    f"{found['mcnemar_p']:.2g}",
                )
            )
    head = ("", "PyTorch", "runner", "difference", "interval, each end 95 %", "lost, gained", "McNemar p")
    gate = f"Gate: {details['gate']:g} of PyTorch's top-1, a difference of {details['lowest_difference_allowed']:+.3%}."
    return f'<p class="quiet">{gate}</p>{table(head, rows)}'


def _flips(details: Mapping[str, Any]) -> str:
    flips = details["flips"]
    if not flips:
        return '<p class="quiet">No class flipped.</p>'
    rows = [
        (
            escape(flip["where"]),
            escape(flip["wanted"]),
            escape(flip["found"]),
            f"{flip['margin']:.3g}",
            "within the noise" if flip["within_noise"] else '<span class="failed">wrong</span>',
        )
        for flip in flips[:_MOST_FLIPS]
    ]
    more = len(flips) + details["flips_not_listed"] - len(rows)
    note = f'<p class="quiet">And {more} more.</p>' if more else ""
    return table(("image", "PyTorch", "runner", "margin", ""), rows) + note


def _skipped(report: ParityReport) -> str:
    lines = list(report.skipped)
    lines += [
        f"{runner.runner}: {check.name}: {check.says}"
        for runner in report.runners
        for check in runner.checks
        if check.verdict == "skipped"
    ]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>Skipped</h2><ul>{items}</ul>" if lines else ""


def _provenance(report: ParityReport) -> dict[str, str]:
    bundle, data = report.bundle, report.data
    rows = {
        "bundle": f"{bundle['path']}, SHA-256 {bundle['sha256']}",
        "model.onnx": f"SHA-256 {bundle['onnx_sha256']}",
        "checkpoint": f"{bundle['checkpoint']['name']}, SHA-256 {bundle['checkpoint']['sha256']}",
        "data": "none",
        "versions": ", ".join(f"{name} {version}" for name, version in report.versions.items()),
    }
    if data is not None:
        rows["data"] = f"{data['name']}: {data['images']:,} of {data['of']:,} images, SHA-256 {data['sha256']}"
    return rows


def _broken(data: Mapping[str, Any] | None) -> str:
    if data is None or not data["broken"]:
        return ""
    items = "".join(f"<li>{escape(one['image'])}: {escape(one['why'])}</li>" for one in data["broken_images"])
    return f"<h2>Broken images</h2><p>{data['broken']} were left out.</p><ul>{items}</ul>"
