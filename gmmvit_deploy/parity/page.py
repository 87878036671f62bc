"""Write a parity report as a self-contained page, for the person who approves a deployment and for later reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.parity._multi_label import MEASURES
from gmmvit_deploy.parity._numeric import STORED
from gmmvit_deploy.parity._verdict import Check, joined
from gmmvit_deploy.parity.report import ParityReport, RunnerReport, shown_inputs
from gmmvit_deploy.reports.pages import Plot, Summary, VerdictWord, figure, rendered, written_page
from gmmvit_deploy.reports.plotting import SERIES, bar_style, figure_and_axes, svg

_ERROR, _LIMIT = SERIES[:2]
_MANY_CLASSES = 40
_MAX_FLIPS = 200
_MAX_REASONS = 8


def write_page(report: ParityReport, path: Path, *, force: bool = False) -> None:
    """Write the page of a report to ``path``.  Errors: every error of `written_page`."""
    written_page(page_of(report), path, force=force)


def page_of(report: ParityReport) -> str:
    """Return the page as HTML text, which loads nothing from the network."""
    name = Path(str(report.bundle["path"])).name
    checks = report.all_checks
    return rendered(
        "parity/page.html",
        title=f"Parity of {name}: {report.bundle['model']}",
        summary=summary_of(report),
        checks=[_check(*check) for check in checks if check[1].verdict != "skipped"],
        failures=report.failures(),
        skipped_checks=[_check(*check) for check in checks if check[1].verdict == "skipped"],
        skipped=report.skipped,
        runners=list(map(_runner, report.runners)),
        scope=_provenance(report),
        data=report.data,
    )


def _check(runner: str, check: Check) -> tuple[str | VerdictWord, ...]:
    return runner, check.name, VerdictWord(check.verdict, check.verdict), check.summary


def _runner(runner: RunnerReport) -> dict[str, Any]:
    """Return what the page shows of a runner.  A bundle without logits has no accuracy, and decides nothing."""
    accuracy, decisions = runner.check("accuracy").details, runner.check("decisions").details
    flips = decisions.get("flips", ())
    more = len(flips[_MAX_FLIPS:]) + decisions["flips_not_listed"] if flips else 0
    no_flips = "No predicted class changed." if decisions else ""
    return {
        "name": runner.name,
        "provenance": dict(runner.provenance),
        "figures": _figures(runner.name, runner),
        "distances": _distances(runner.check("numeric").details["sets"]),
        "accuracy": _accuracy(accuracy) if accuracy else None,
        "flips": list(map(_flip, flips[:_MAX_FLIPS])),
        "flips_note": f"And {more} more prediction changes." if more else "" if flips else no_flips,
    }


def _figures(name: str, runner: RunnerReport) -> list[Plot]:
    figures = []
    if len(runner.points[0]):
        what = "Each point is an input; a cross marks an input whose predicted class changed."
        figures.append(figure(_margin_plot(*runner.points), f"Margin against error: {name}", what))
    localize = runner.check("localize")
    if blocks := localize.details.get("blocks"):
        changed = localize.details["looking_changed_logits_by"]
        what = f"{localize.summary}. Reading the blocks' outputs changed the logits by {changed:.2g}."
        figures.append(figure(_block_plot(blocks), f"Error by block: {name}", what))
    accuracy = runner.check("accuracy").details
    if "top1" in accuracy:
        what = f"Top-1 on {accuracy['images']:,} images. {accuracy['classes']}"
        figures.append(figure(_class_plot(accuracy["per_class"]), f"Accuracy by class: {name}", what))
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
    rows: list[tuple[str, ...]] = []
    for key, words in {"top1": "top-1", "top5": "top-5", "all_right": "all labels right"}.items():
        if numbers := details.get(key):
            low, high = numbers["interval"]
            difference = f"{numbers['difference']:+.2%}", f"{low:+.2%} to {high:+.2%}"
            changed = f"{numbers['lost']}, {numbers['gained']}", f"{numbers['mcnemar_p']:.2g}"
            rows.append((words, f"{numbers['pytorch']:.2%}", f"{numbers['runner']:.2%}", *difference, *changed))
    for key, words in MEASURES.items() if "measures" in details else ():
        both = (details["measures"][who][key] for who in ("pytorch", "runner"))
        rows.append((words, *("" if value is None else f"{value:.4f}" for value in both), *[""] * 4))
    head = (
        "measure",
        "PyTorch",
        "runner",
        "difference",
        "interval of the difference (each end is a one-sided 95 % bound)",
        "only PyTorch right, only runner right",
        "McNemar p",
    )
    also = ", mAP and macro F1 too" if "measures" in details else ""
    gate = (
        f"Gate: at least {details['gate']:g} times PyTorch's{also}. "
        f"The lowest difference that passes is {details['lowest_difference_allowed']:+.3%}."
    )
    return {"head": head, "rows": rows, "gate": gate}


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


# ---- summary -------------------------------------------------------------------------------------------------------


def summary_of(report: ParityReport) -> Summary:
    """Return the verdict and what would change the verdict: failed checks, undecided checks, or the nearest limits."""
    ran = [(who, check.verdict) for who, check in report.all_checks if check.verdict != "skipped"]
    counted = {verdict: [who for who, each in ran if each == verdict] for verdict in ("failed", "undecided")}
    if report.verdict == "failed":
        culprits = joined(list(dict.fromkeys(counted["failed"])))
        sentence = f"Do not deploy {culprits}: {len(counted['failed'])} of {len(ran)} checks failed."
        if not culprits:
            sentence = "Do not deploy anything: no check ran."
        changes = (*report.reasons("failed", _MAX_REASONS), *_scope(report))
        return Summary(outcome="failed", word="FAILED", sentence=sentence, changes=changes)
    runners = joined([runner.name for runner in report.runners])
    if report.verdict == "undecided":
        sentence = (
            f"No check failed for {runners}, but {len(counted['undecided'])} of {len(ran)} checks could not decide: "
            "approve only if the reasons below are acceptable."
        )
        changes = (*report.reasons("undecided", _MAX_REASONS), *_scope(report))
        return Summary(outcome="undecided", word="UNDECIDED", sentence=sentence, changes=changes)
    sentence = f"{runners} can stand in for the trained PyTorch model: all {len(ran)} checks that ran passed."
    near = tuple(line for runner in report.runners for line in _nearest_limits(runner))
    more = filter(None, [report.more_images])
    return Summary(outcome="passed", word="PASSED", sentence=sentence, changes=(*more, *near, *_scope(report)))


def _nearest_limits(runner: RunnerReport) -> Iterator[str]:
    """Yield lines that state how close the results of a runner that passed are to the limits."""
    name, worst = runner.name, runner.nearest_to_limit
    largest, limit = worst["from_exact"]["largest"], worst["limit"]["largest"]
    yield (
        f"{name}: logits differ by at most {largest:.2g} from {worst['reference']} (inputs: {worst['inputs']}, batch "
        f"{worst['batch']}); the numeric check fails above {limit:.2g}, and {largest / limit:.0%} of this limit is used"
    )
    details = runner.check("decisions").details
    if details.get("nearest_to_flipping") is not None:
        share, count = 100 * details["nearest_to_flipping"], details["inputs"]
        yield f"{name}: the largest error is {share:.2g} % of what may change a predicted class, on {count:,} inputs"


def _scope(report: ParityReport) -> Iterator[str]:
    skipped = len(report.skipped) + sum(check.verdict == "skipped" for _, check in report.all_checks)
    if skipped:
        yield f"Skipped checks and runners ({skipped}, listed below with the reasons) may fail once they run"
    yield "Another bundle, engine, server, machine or version may fail: the verdict covers only what “Scope” lists"


# ---- plots ---------------------------------------------------------------------------------------------------------


def _block_plot(blocks: Sequence[Mapping[str, Any]]) -> str:
    figure, axes = figure_and_axes(height=3.6)
    names = [block["block"] for block in blocks]
    axes.plot(names, [max(block["largest"], 1e-12) for block in blocks], "o-", color=_ERROR, label="largest error")
    limits = [block["limit"] for block in blocks]
    if all(limit is not None for limit in limits):
        axes.plot(names, limits, "--", color=_LIMIT, label="limit")
    axes.set(yscale="log", ylabel="distance from float64")
    axes.tick_params(axis="x", rotation=60)
    axes.legend(frameon=False)
    shown = "; ".join(f"{block['block']}: {block['largest']:.2g}" for block in blocks)
    return svg(figure, f"Line of the largest distance from float64 after each block. {shown}.")


def _margin_plot(margins: NDArray[Any], errors: NDArray[Any], flipped: NDArray[Any]) -> str:
    """Plot `RunnerReport.points`.  Above the line error = margin / 2, numeric error may flip the predicted class."""
    figure, axes = figure_and_axes(height=4.2)
    beyond = int((errors > margins / 2).sum())
    margins, errors = np.maximum(margins, 1e-10), np.maximum(errors, 1e-10)  # the axes are logarithmic
    # The points are drawn as a single bitmap, because browsers fail on a page with ten thousand SVG shapes.
    axes.scatter(margins[~flipped], errors[~flipped], s=8, color=_ERROR, alpha=0.5, lw=0, rasterized=True)
    if flipped.any():
        axes.scatter(margins[flipped], errors[flipped], s=40, color=_LIMIT, marker="x", label="flipped")
    low, high = float(margins.min()), float(margins.max())
    axes.plot([low, high], [low / 2, high / 2], "--", color=_LIMIT, label="error = margin / 2")
    names = {"xlabel": "margin of the decision (logits)", "ylabel": "largest error of a logit"}
    axes.set(xscale="log", yscale="log", **names)
    axes.legend(frameon=False)
    return svg(
        figure,
        f"Points of {len(margins):,} inputs: the largest error of a logit against the margin of the decision. "
        f"For {beyond:,} inputs the error is above half the margin, where the predicted class may change; "
        f"{int(flipped.sum()):,} inputs flipped.",
    )


def _class_plot(classes: Sequence[Mapping[str, Any]]) -> str:
    """Plot the accuracy of PyTorch and of the runner by class, of the 40 classes in which it differs most."""
    chosen = sorted(classes, key=lambda row: -abs(row["pytorch"] - row["runner"]) / row["images"])[:_MANY_CLASSES]
    shown = [row for row in classes if row in chosen]
    figure, axes = figure_and_axes(height=3.4)
    places = np.arange(len(shown))
    for number, (shift, key, name) in enumerate(((-0.2, "pytorch", "PyTorch"), (0.2, "runner", "runner"))):
        shares = [100 * row[key] / row["images"] for row in shown]
        axes.bar(places + shift, shares, 0.4, label=name, **bar_style(number))
    axes.set_xticks(places, [row["class"] for row in shown], rotation=60 if len(shown) > 12 else 0)
    axes.set(ylim=(0, 100), ylabel="correct, %")
    axes.legend(frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    words = "; ".join(
        f"{row['class']}: PyTorch {row['pytorch'] / row['images']:.0%}, runner {row['runner'] / row['images']:.0%}"
        for row in shown
    )
    return svg(
        figure, f"Pairs of bars by class: the shares of images that PyTorch and the runner classify correctly. {words}."
    )
