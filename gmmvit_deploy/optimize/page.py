"""Write a choice as a self-contained page: what was chosen, speed and accuracy of all candidates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.cascades import CascadeRecord, read_cascade
from gmmvit_deploy.bundle.choices import Candidate, Choice
from gmmvit_deploy.intervals import Measured
from gmmvit_deploy.optimize.table import cascades_of, could_pass, head_of, left_out_rows, passed_rows, reasons_of
from gmmvit_deploy.reports.pages import Summary, figure, rendered, written_page
from gmmvit_deploy.reports.plotting import SERIES, figure_and_axes, svg


def write_page(choice: Choice, bundle: Bundle, path: Path, *, force: bool = False) -> None:
    """Write the page of a choice to ``path``.  Errors: every error of `written_page`."""
    written_page(page_of(choice, bundle), path, force=force)


def page_of(choice: Choice, bundle: Bundle) -> str:
    """Return the page as HTML text, which loads nothing from the network."""
    timed = [(one, one.speed) for one in choice.candidates if one.speed is not None]
    plots = []
    if timed:
        what = (
            "A row for each candidate that was timed. Bars are the intervals: of the speed at 95 %, of the "
            f"{choice.gate.kind if choice.gate else ''} with each end a one-sided 95 % bound."
        )
        plots.append(figure(_plot(timed, choice), "Speed and accuracy", what))
    if curves := _curves(choice, bundle):
        what = (
            "For each cascade, on the images that chose its threshold: the share of the decisions that are kept if so "
            "many images are computed again. Dashed: what the images prove (a one-sided 95 % bound). The mark is the "
            "threshold."
        )
        plots.append(figure(_plot_of_curves(curves), "Images that float32 computes again", what))
    return rendered(
        "optimize/page.html",
        title=f"Runners of {bundle.path.name}",
        summary=_summary(choice, bundle),
        head=head_of(choice),
        passed=passed_rows(choice),
        left_out=left_out_rows(choice),
        not_tried=reasons_of(choice),
        cascades=cascades_of(choice, bundle),
        plots=plots,
        scope=_scope(choice, bundle),
    )


def _summary(choice: Choice, bundle: Bundle) -> Summary:
    best = choice.passed[0]
    speed = ""
    if best.speed is not None and best.runner != choice.base:
        speed = f", {best.speed.value:.2f} times as fast as {choice.base}"
    gate = f" and reach the gate, {choice.gate.kind} {choice.gate.min_share:g}," if choice.gate is not None else ""
    sentence = (
        f"{best.runner} is the fastest{speed}, for {choice.goal} at batch {choice.batch} on {choice.machine}, "
        f"of those that pass all checks{gate} on these images."
    )
    changes = [could_pass(choice, bundle.path)] + [
        f"{one.runner}: its interval contains the gate; {one.images_to_settle:,} images with the same shares "
        "would settle it"
        for one in choice.passed
        if one.images_to_settle is not None
    ]
    return Summary(outcome="passed", word="CHOSEN", sentence=sentence, changes=tuple(filter(None, changes)))


def _plot(timed: list[tuple[Candidate, Measured]], choice: Choice) -> str:
    """timed: candidates, each with its speed; a row for each, so that no name overlaps another."""
    kind = choice.gate.kind if choice.gate is not None else "judged"
    figure_, (speeds, shares) = figure_and_axes(height=1.3 + 0.3 * len(timed), columns=2)
    for passed, style in ((True, {"fmt": "o", "color": SERIES[0]}), (False, {"fmt": "x", "color": SERIES[1]})):
        rows = [(row, one, speed) for row, (one, speed) in enumerate(timed) if one.passed is passed]
        label = "passed" if passed else "left out"
        _bars(speeds, [(row, speed) for row, _, speed in rows], label=label, **style)
        _bars(shares, [(row, one.judged) for row, one, _ in rows if one.judged is not None], **style)
    if choice.gate is not None:
        least = choice.gate.min_share
        shares.axvline(least, linestyle="--", color=SERIES[2], label=f"gate {least:g}")
    speeds.set_yticks(range(len(timed)), [str(one.runner) for one, _ in timed])
    speeds.invert_yaxis()  # of both
    speeds.set(xlabel=f"speed, {choice.base} = 1")
    shares.set(xlabel=kind)
    figure_.legend(frameon=False, ncols=3, loc="outside upper right")
    words = "; ".join(
        f"{one.runner}: speed {speed.value:.2f}" + (f", {kind} {one.judged.value:.4f}" if one.judged else "")
        for one, speed in timed
    )
    return svg(figure_, f"Rows of candidates: the speed, relative to {choice.base}, and the {kind}. {words}.")


def _curves(choice: Choice, bundle: Bundle) -> dict[str, CascadeRecord]:
    """Return the records of the cascades that were timed."""
    return {
        str(one.runner): read_cascade(bundle, one.runner, one.graph_sha256)
        for one in choice.candidates
        if one.on_images is not None
    }


def _plot_of_curves(curves: dict[str, CascadeRecord]) -> str:
    figure_, axes = figure_and_axes(height=3.0)
    words = []
    for color, (name, record) in zip(SERIES, curves.items(), strict=False):
        curve, chosen = record.curve, record.chosen
        shares = [100 * point["deferred"] for point in curve]
        axes.plot(shares, [100 * point["kept"] for point in curve], color=color, label=name)
        axes.plot(shares, [100 * point["kept_low"] for point in curve], color=color, linestyle="--")
        axes.plot([100 * chosen.deferred], [100 * chosen.kept], "o", color=color)
        words.append(f"{name}: {chosen.kept:.2%} kept with {chosen.deferred:.1%} computed again")
    axes.set(xlabel="computed again, %", ylabel="decisions kept, %")
    axes.legend(frameon=False)
    return svg(figure_, f"Lines: share computed again and share of decisions kept. {'; '.join(words)}.")


def _bars(axes: Any, rows: list[tuple[int, Measured]], **style: Any) -> None:
    ends = [[abs(getattr(measured, end) - measured.value) for _, measured in rows] for end in ("low", "high")]
    places = [row for row, _ in rows]
    axes.errorbar([measured.value for _, measured in rows], places, xerr=ends, capsize=3, lw=1, **style)


def _scope(choice: Choice, bundle: Bundle) -> dict[str, str]:
    images = choice.images
    return {
        "bundle": f"{bundle.path}, SHA-256 {bundle.sha256}",
        "machine": str(choice.machine),
        "images": "" if images is None else f"{images}, SHA-256 {images.sha256}",
        "versions": ", ".join(f"{name} {version}" for name, version in choice.versions.items()),
        "made at": choice.made_at,
    }
