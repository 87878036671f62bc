"""Draw the plots of a parity report as SVG text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.reports.plotting import SERIES, bar_style, figure_and_axes, svg

_ERROR, _LIMIT = SERIES[:2]
_MANY_CLASSES = 40


def block_plot(blocks: Sequence[Mapping[str, Any]]) -> str:
    """Plot the largest error of every block's output and the limit of the error, on a logarithmic scale."""
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


def margin_plot(margins: NDArray[Any], errors: NDArray[Any], flipped: NDArray[Any]) -> str:
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


def class_plot(classes: Sequence[Mapping[str, Any]]) -> str:
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
