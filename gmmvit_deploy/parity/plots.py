"""The pictures of a parity report, as SVG text: error by block, margin against error, accuracy by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.plotting import figure_and_axes, svg

__all__ = ["block_plot", "class_plot", "margin_plot"]

_FOUND, _LIMIT, _FLIP, _WANTED = "#1f4e9c", "#8a1c00", "#d9480f", "#8a8f98"
_MANY_CLASSES = 40


def block_plot(blocks: Sequence[Mapping[str, Any]]) -> str:
    """Largest error of every block's output, and what it may be, on a logarithmic scale."""
    figure, axes = figure_and_axes(height=3.6)
    names = [block["block"] for block in blocks]
    axes.plot(names, [max(block["largest"], 1e-12) for block in blocks], "o-", color=_FOUND, label="largest error")
    limits = [block["limit"] for block in blocks]
    if all(limit is not None for limit in limits):
        axes.plot(names, limits, "--", color=_LIMIT, label="limit")
    axes.set_yscale("log")
    axes.set_ylabel("distance from float64")
    axes.tick_params(axis="x", rotation=60)
    axes.legend(frameon=False)
    return svg(figure)


def margin_plot(margins: NDArray[Any], errors: NDArray[Any], flipped: NDArray[Any]) -> str:
    """One point an input: beyond the line, where the error is half the margin, a class may flip."""
    figure, axes = figure_and_axes(height=4.2)
    least = 1e-10
    margins, errors = np.maximum(margins, least), np.maximum(errors, least)
    # Points are drawn as one picture: ten thousand of them as shapes would make a page nobody can open.
    axes.scatter(margins[~flipped], errors[~flipped], s=8, color=_FOUND, alpha=0.5, lw=0, rasterized=True)
    if flipped.any():
        axes.scatter(margins[flipped], errors[flipped], s=40, color=_FLIP, marker="x", label="flipped")
    low, high = float(margins.min()), float(margins.max())
    axes.plot([low, high], [low / 2, high / 2], "--", color=_LIMIT, label="error = margin / 2")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("margin of the decision (logits)")
    axes.set_ylabel("largest error of a logit")
    axes.legend(frameon=False)
    return svg(figure)


def class_plot(classes: Sequence[Mapping[str, Any]]) -> str:
    """Share of each class's images that PyTorch and the runner have right; the classes that differ most, if many."""
    chosen = sorted(classes, key=lambda one: -abs(one["pytorch"] - one["runner"]) / one["images"])[:_MANY_CLASSES]
    shown = [one for one in classes if one in chosen]
    figure, axes = figure_and_axes(height=3.4)
    places = np.arange(len(shown))
    for shift, key, colour, name in ((-0.2, "pytorch", _WANTED, "PyTorch"), (0.2, "runner", _FOUND, "runner")):
        shares = [100 * one[key] / one["images"] for one in shown]
        axes.bar(places + shift, shares, 0.4, color=colour, label=name)
    axes.set_xticks(places, [one["class"] for one in shown], rotation=60 if len(shown) > 12 else 0)
    axes.set_ylabel("right, %")
    axes.set_ylim(0, 100)
    axes.legend(frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    return svg(figure)
