"""Write a parity report as a self-contained page, for the person who approves a deployment and for later reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from gmmvit_deploy.parity.plots import block_plot, class_plot, margin_plot
from gmmvit_deploy.parity.report import ParityReport, RunnerReport
from gmmvit_deploy.parity.summary import summary_of
from gmmvit_deploy.parity.verdict import Check
from gmmvit_deploy.reports.pages import (
    definitions,
    figure,
    folded,
    items,
    page,
    plots,
    section,
    table,
    verdict_word,
    written_page,
)

__all__ = ["page_of", "write_page"]

_MOST_FLIPS = 200


def write_page(report: ParityReport, path: Path, *, force: bool = False) -> None:
    """Write the page of a report to ``path``.  Errors: every error of `written_page`."""
    written_page(page_of(report), path, force=force)


def page_of(report: ParityReport) -> str:
    """Return the page as HTML text, which loads nothing from the network."""
    name = Path(str(report.bundle["path"])).name
    return page(
        kind="Parity report: does the deployed model compute what PyTorch computes?",
        title=f"Parity of {name}: {report.bundle['model']}",
        summary=summary_of(report),
        sections=(
            section("Checks", _checks_table(report), _failures(report), _skipped(report)),
            *(_runner(runner) for runner in report.runners),
            section("Scope", definitions(_provenance(report))),
            _broken(report.data),
        ),
    )


def _checks_table(report: ParityReport) -> str:
    cells = [
        (escape(who), escape(precision), escape(check.name), verdict_word(check.verdict), escape(check.summary))
        for who, precision, check in _checks(report)
        if check.verdict != "skipped"
    ]
    return table("Checks that ran", ("runner", "precision", "check", "verdict", "result"), cells, row_head=2)


def _failures(report: ParityReport) -> str:
    failures = report.failures()
    return folded("Reasons of all failed checks", len(failures), items(failures))


def _skipped(report: ParityReport) -> str:
    cells = [
        (escape(who), escape(precision), escape(check.name), verdict_word("skipped"), escape(check.summary))
        for who, precision, check in _checks(report)
        if check.verdict == "skipped"
    ]
    head = ("runner", "precision", "check", "verdict", "reason")
    rows = table("Checks that did not run", head, cells, row_head=2) if cells else ""
    return folded("Skipped", len(cells) + len(report.skipped), rows, items(report.skipped))


def _checks(report: ParityReport) -> list[tuple[str, str, Check]]:
    """Return (runner, precision, check) for each check; the checks of the bundle, with runner "bundle", come first."""
    of_bundle = [("bundle", "", check) for check in report.checks]
    return of_bundle + [
        (runner.runner, runner.precision, check) for runner in report.runners for check in runner.checks
    ]


def _runner(runner: RunnerReport) -> str:
    name = f"{runner.runner}, {runner.precision}"
    checks = {check.name: check for check in runner.checks}
    figures = []
    if len(runner.points[0]):
        what = "Each point is an input; a cross marks an input whose predicted class flipped."
        figures.append(figure(margin_plot(*runner.points), f"Margin against error: {name}", what))
    blocks = checks["localize"].details.get("blocks") if "localize" in checks else None
    if blocks:
        changed = checks["localize"].details["looking_changed_logits_by"]
        what = f"{checks['localize'].summary}. Reading the blocks' outputs changed the logits by {changed:.2g}."
        figures.append(figure(block_plot(blocks), f"Error by block: {name}", what))
    accuracy = checks["accuracy"].details
    if "top1" in accuracy:
        what = f"Top-1 on {accuracy['images']:,} images. {accuracy['classes']}"
        figures.append(figure(class_plot(accuracy["per_class"]), f"Accuracy by class: {name}", what))
    return section(
        name,
        definitions(dict(runner.provenance)),
        plots(figures),
        _distances(name, checks["numeric"].details["sets"]),
        _accuracy(name, accuracy),
        _flips(name, checks["decisions"].details),
    )


def _distances(name: str, sets: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for numbers in sets:
        both = (("float64", "from_exact"), ("float32", "from_trained"))
        for reference, key in (("float32, stored at export", "from_exact"),) if numbers["stored"] else both:
            distances = numbers[key]
            shown = [f"{distances[measure]:.2e}" for measure in ("largest", "p99", "rms", "relative_l2")]
            cosine = f"1 − {1 - distances['cosine']:.1e}"
            limit, why = (
                (f"{numbers['limit']['largest']:.2e}", numbers["limit"]["derivation"])
                if key == "from_exact"
                else ("", "")
            )
            first = (escape(numbers["inputs"]), str(distances["rows"]), reference)
            rows.append((*first, *shown, cosine, limit, escape(why)))
    head = (
        "inputs",
        "rows",
        "reference",
        "largest",
        "99th percentile",
        "rms",
        "relative L2",
        "cosine",
        "limit of the largest",
        "derivation of the limit",
    )
    return table(f"Distance of the logits from PyTorch's: {name}", head, rows)


def _accuracy(name: str, details: Mapping[str, Any]) -> str:
    if not details:
        return ""
    if "measures" in details:
        return _multi_label_accuracy(name, details)
    rows = []
    for measure in ("top1", "top5"):
        numbers = details[measure]
        if numbers is not None:
            low, high = numbers["interval"]
            rows.append(
                (
                    measure.replace("top", "top-"),
                    f"{numbers['pytorch']:.2%}",
                    f"{numbers['runner']:.2%}",
                    f"{numbers['difference']:+.2%}",
                    f"{low:+.2%} to {high:+.2%}",
                    f"{numbers['lost']}, {numbers['gained']}",
                    f"{numbers['mcnemar_p']:.2g}",
                )
            )
    head = (
        "measure",
        "PyTorch",
        "runner",
        "difference",
        "interval of the difference (each end is a one-sided 95 % bound)",
        "only PyTorch right, only runner right",
        "McNemar p",
    )
    gate = (
        f"Gate: the runner's top-1 must be at least {details['gate']:g} times PyTorch's top-1, "
        f"so the lowest difference that passes is {details['lowest_difference_allowed']:+.3%}."
    )
    return f'{table(f"Accuracy: {name}", head, rows)}<p class="quiet">{gate}</p>'


def _multi_label_accuracy(name: str, details: Mapping[str, Any]) -> str:
    shown = {"map": "mAP", "f1_macro": "macro F1", "f1_micro": "micro F1"}
    measures, pairs = details["measures"], details["all_right"]
    rows = [
        (
            words,
            *(f"{measures[who][key]:.4f}" if measures[who][key] is not None else "" for who in ("pytorch", "runner")),
        )
        for key, words in shown.items()
    ]
    rows.append(("all labels right", f"{pairs['pytorch']:.2%}", f"{pairs['runner']:.2%}"))
    low, high = pairs["interval"]
    gate = (
        f"On {details['images']:,} images. mAP and macro F1 must be at least {details['gate']:g} times PyTorch's. The "
        f"difference of all labels right is {low:+.2%} to {high:+.2%}; it passes at "
        f"{details['lowest_difference_allowed']:+.3%} or above."
    )
    table_html = table(f"Accuracy: {name}", ("measure", "PyTorch", "runner"), rows)
    return f'{table_html}<p class="quiet">{escape(gate)}</p>'


def _flips(name: str, details: Mapping[str, Any]) -> str:
    flips = details.get("flips")  # a bundle without logits decides nothing
    if not flips:
        return '<p class="quiet">No predicted class flipped.</p>'
    rows = [
        (
            escape(flip["where"]),
            escape(flip["pytorch_class"]),
            escape(flip["runner_class"]),
            f"{flip['margin']:.3g}",
            verdict_word("passed", "within the noise") if flip["within_noise"] else verdict_word("failed", "wrong"),
        )
        for flip in flips[:_MOST_FLIPS]
    ]
    more = len(flips) + details["flips_not_listed"] - len(rows)
    note = f'<p class="quiet">And {more} more flips.</p>' if more else ""
    return (
        table(f"Flipped decisions: {name}", ("input", "PyTorch's class", "runner's class", "margin", "judgement"), rows)
        + note
    )


def _provenance(report: ParityReport) -> dict[str, str]:
    bundle, data = report.bundle, report.data
    rows = {
        "bundle": f"{bundle['path']}, SHA-256 {bundle['sha256']}",
        "model.onnx": f"SHA-256 {bundle['onnx_sha256']}",
        "checkpoint": f"{bundle['checkpoint']['name']}, SHA-256 {bundle['checkpoint']['sha256']}",
        "data": "no images were given (--data)",
        "versions": ", ".join(f"{name} {version}" for name, version in report.versions.items()),
    }
    if data is not None:
        rows["data"] = f"{data['name']}: {data['images']:,} of {data['of']:,} images, SHA-256 {data['sha256']}"
    return rows


def _broken(data: Mapping[str, Any] | None) -> str:
    if data is None or not data["broken"]:
        return ""
    lines = [f"{image['image']}: {image['why']}" for image in data["broken_images"]]
    return section(
        "Broken images", f"<p>{data['broken']} images could not be decoded and were left out.</p>", items(lines)
    )
