"""Write a choice as a self-contained page: what was chosen, accuracy against speed, and all candidates."""

from __future__ import annotations

from pathlib import Path

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.choices import Candidate, Choice
from gmmvit_deploy.intervals import Measured
from gmmvit_deploy.optimize.table import head_of, left_out_rows, passed_rows, reasons_of
from gmmvit_deploy.reports.pages import Summary, figure, rendered, written_page
from gmmvit_deploy.reports.plotting import SERIES, figure_and_axes, svg


def write_page(choice: Choice, bundle: Bundle, path: Path, *, force: bool = False) -> None:
    """Write the page of a choice to ``path``.  Errors: every error of `written_page`."""
    written_page(page_of(choice, bundle), path, force=force)


def page_of(choice: Choice, bundle: Bundle) -> str:
    """Return the page as HTML text, which loads nothing from the network."""
    plotted = [(one, one.speed, one.judged) for one in choice.candidates if one.speed and one.judged]
    plots = []
    if plotted:
        what = (
            "Each point is a candidate; a cross was left out. Bars are the intervals: of the speed at 95 %, of the "
            f"{choice.gate.kind if choice.gate else ''} with each end a one-sided 95 % bound."
        )
        plots.append(figure(_plot(plotted, choice), "Accuracy against speed", what))
    return rendered(
        "optimize/page.html",
        title=f"Runners of {bundle.path.name}",
        summary=_summary(choice),
        head=head_of(choice),
        passed=passed_rows(choice),
        left_out=left_out_rows(choice),
        not_tried=reasons_of(choice),
        plots=plots,
        scope=_scope(choice, bundle),
    )


def _summary(choice: Choice) -> Summary:
    best = choice.passed[0]
    speed = f", {best.speed.value:.2f} times as fast as {choice.base}" if best.speed is not None else ""
    gate = f" and reach the gate, {choice.gate.kind} {choice.gate.min_share:g}," if choice.gate is not None else ""
    sentence = (
        f"{best.runner} is the fastest{speed}, for {choice.goal} at batch {choice.batch} on {choice.machine}, "
        f"of those that pass all checks{gate} on these images."
    )
    changes = [
        f"{one.runner}: its interval contains the gate; {one.images_to_settle:,} images with the same shares "
        "would settle it"
        for one in choice.passed
        if one.images_to_settle is not None
    ]
    return Summary(outcome="passed", word="CHOSEN", sentence=sentence, changes=tuple(changes))


def _plot(plotted: list[tuple[Candidate, Measured, Measured]], choice: Choice) -> str:
    """plotted: candidates, each with its speed and the value that the gate judged."""
    figure_, axes = figure_and_axes(height=4.2)
    for passed in (True, False):
        shown = [each for each in plotted if each[0].passed is passed]
        axes.errorbar(
            [speed.value for _, speed, _ in shown],
            [judged.value for *_, judged in shown],
            xerr=[[abs(getattr(speed, end) - speed.value) for _, speed, _ in shown] for end in ("low", "high")],
            yerr=[[abs(getattr(judged, end) - judged.value) for *_, judged in shown] for end in ("low", "high")],
            fmt="o" if passed else "x",
            color=SERIES[0 if passed else 1],
            capsize=3,
            lw=1,
            label="passed" if passed else "left out",
        )
        for one, speed, judged in shown:
            place = {"xytext": (5, 5), "textcoords": "offset points"}
            axes.annotate(str(one.runner), (speed.value, judged.value), **place, fontsize=8)
    kind = "judged"
    if choice.gate is not None:
        kind = choice.gate.kind
        axes.axhline(choice.gate.min_share, linestyle="--", color=SERIES[2], label=f"gate {choice.gate.min_share:g}")
    axes.set(xlabel=f"speed, {choice.base} = 1", ylabel=kind)
    axes.legend(frameon=False)
    words = "; ".join(f"{one.runner}: {judged.value:.4f} at {speed.value:.2f}" for one, speed, judged in plotted)
    return svg(figure_, f"Points of candidates: the {kind} against the speed, relative to {choice.base}. {words}.")


def _scope(choice: Choice, bundle: Bundle) -> dict[str, str]:
    images = choice.images
    return {
        "bundle": f"{bundle.path}, SHA-256 {bundle.sha256}",
        "machine": str(choice.machine),
        "images": "" if images is None else f"{images}, SHA-256 {images.sha256}",
        "versions": ", ".join(f"{name} {version}" for name, version in choice.versions.items()),
        "made at": choice.made_at,
    }
