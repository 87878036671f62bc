"""Write a parity report as a self-contained page, for the person who approves a deployment and for later reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gmmvit_deploy.parity._numeric import STORED
from gmmvit_deploy.parity._plots import block_plot, class_plot, margin_plot, mixed_plot
from gmmvit_deploy.parity._summary import summary_of
from gmmvit_deploy.parity._verdict import Check
from gmmvit_deploy.parity.report import ParityReport, RunnerReport, shown_inputs
from gmmvit_deploy.reports.pages import Plot, VerdictWord, figure, rendered, written_page

__all__ = ["page_of", "write_page"]

_MOST_FLIPS = 200
_MEASURES = {"map": "mAP", "f1_macro": "macro F1", "f1_micro": "micro F1"}


def write_page(report: ParityReport, path: Path, *, force: bool = False) -> None:
    """Write the page of a report to ``path``.  Errors: every error of `written_page`."""
    written_page(page_of(report), path, force=force)


def page_of(report: ParityReport) -> str:
    """Return the page as HTML text, which loads nothing from the network."""
    name = Path(str(report.bundle["path"])).name
    checks = [("bundle", "", check) for check in report.checks]
    checks += [(runner.runner, runner.computes_in, check) for runner in report.runners for check in runner.checks]
    return rendered(
        "parity/page.html",
        title=f"Parity of {name}: {report.bundle['model']}",
        summary=summary_of(report),
        checks=[_check(*check) for check in checks if check[2].verdict != "skipped"],
        failures=report.failures(),
        skipped_checks=[_check(*check) for check in checks if check[2].verdict == "skipped"],
        skipped=report.skipped,
        runners=list(map(_runner, report.runners)),
        scope=_provenance(report),
        data=report.data,
    )


def _check(runner: str, precision: str, check: Check) -> tuple[str | VerdictWord, ...]:
    return runner, precision, check.name, VerdictWord(check.verdict, check.verdict), check.summary


def _runner(runner: RunnerReport) -> dict[str, Any]:
    """Return what the page shows of a runner.  A bundle without logits has no accuracy, and decides nothing."""
    name = f"{runner.runner}, {runner.computes_in}"
    checks = {check.name: check for check in runner.checks}
    accuracy, decisions = checks["accuracy"].details, checks["decisions"].details
    flips = decisions.get("flips", ())
    more = len(flips[_MOST_FLIPS:]) + decisions["flips_not_listed"] if flips else 0
    no_flips = "No predicted class changed." if decisions else ""
    return {
        "name": name,
        "provenance": dict(runner.provenance),
        "figures": _figures(name, runner, checks),
        "distances": _distances(checks["numeric"].details["sets"]),
        "accuracy": _accuracy(accuracy) if accuracy else None,
        "flips": list(map(_flip, flips[:_MOST_FLIPS])),
        "flips_note": f"And {more} more prediction changes." if more else "" if flips else no_flips,
    }


def _figures(name: str, runner: RunnerReport, checks: Mapping[str, Check]) -> list[Plot]:
    figures = []
    if len(runner.points[0]):
        what = "Each point is an input; a cross marks an input whose predicted class changed."
        figures.append(figure(margin_plot(*runner.points), f"Margin against error: {name}", what))
    blocks = checks["localize"].details.get("blocks") if "localize" in checks else None
    if blocks:
        changed = checks["localize"].details["looking_changed_logits_by"]
        what = f"{checks['localize'].summary}. Reading the blocks' outputs changed the logits by {changed:.2g}."
        figures.append(figure(block_plot(blocks), f"Error by block: {name}", what))
    calibration = checks["calibration"].details
    timed = [row for row in calibration.get("curve", ()) if "time" in row and "kept" in row]
    if timed:
        what = (
            "At each point, the numbers of projections in the dynamic form and in float32. Measured when the bundle "
            f"was converted, on {calibration['gate_images']} calibration images that set no range; each end of a bar "
            "is a one-sided 95 % limit."
        )
        plot = mixed_plot(timed, calibration["gate"]["keep_decisions"])
        figures.append(figure(plot, f"Decisions kept against time: {name}", what))
    accuracy = checks["accuracy"].details
    if "top1" in accuracy:
        what = f"Top-1 on {accuracy['images']:,} images. {accuracy['classes']}"
        figures.append(figure(class_plot(accuracy["per_class"]), f"Accuracy by class: {name}", what))
    return figures


def _distances(sets: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    rows = []
    for numbers in sets:
        exact, trained = (numbers["reference"], "from_exact"), ("PyTorch's float32 logits", "from_trained")
        for reference, key in (exact,) if numbers["reference"] == STORED else (exact, trained):
            distances, limit = numbers[key], numbers["limit"]
            rows.append(
                (
                    f"{shown_inputs(numbers['inputs'])}, batch {numbers['batch']}",
                    str(distances["rows"]),
                    reference,
                    *(f"{distances[measure]:.2e}" for measure in ("largest", "p99", "rms", "relative_l2")),
                    f"1 − {1 - distances['cosine']:.1e}",
                    *((f"{limit['largest']:.2e}", limit["derivation"]) if key == "from_exact" else ("", "")),
                )
            )
    return rows


def _accuracy(details: Mapping[str, Any]) -> dict[str, Any]:
    """Return head, rows and gate of the table of a single-label or a multi-label network."""
    if "measures" in details:
        return _multi_label_accuracy(details)
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
    return {"head": head, "rows": rows, "gate": gate}


def _multi_label_accuracy(details: Mapping[str, Any]) -> dict[str, Any]:
    measures, pairs = details["measures"], details["all_right"]
    rows = []
    for key, words in _MEASURES.items():
        both = (measures[who][key] for who in ("pytorch", "runner"))
        rows.append((words, *("" if value is None else f"{value:.4f}" for value in both)))
    rows.append(("all labels right", f"{pairs['pytorch']:.2%}", f"{pairs['runner']:.2%}"))
    low, high = pairs["interval"]
    gate = (
        f"On {details['images']:,} images. mAP and macro F1 must be at least {details['gate']:g} times PyTorch's. The "
        f"difference of all labels right is {low:+.2%} to {high:+.2%}; it passes at "
        f"{details['lowest_difference_allowed']:+.3%} or above."
    )
    return {"head": ("measure", "PyTorch", "runner"), "rows": rows, "gate": gate}


def _flip(flip: Mapping[str, Any]) -> tuple[str | VerdictWord, ...]:
    return (
        flip["where"],
        flip["pytorch_class"],
        flip["runner_class"],
        f"{flip['margin']:.3g}",
        VerdictWord("passed", "within the noise") if flip["within_noise"] else VerdictWord("failed", "wrong"),
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
        if left_out := report.left_out():
            rows["data"] += f"; {left_out}"
    return rows
