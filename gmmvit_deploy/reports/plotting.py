"""Draw the plots of reports without a window, as SVG that is the same for the same data."""

from __future__ import annotations

import io
import re
from html import escape
from typing import Any

from gmmvit_deploy.extras import require

SERIES = ("#0072b2", "#d55e00", "#552222", "#9900ff", "#bb7777", "#221188", "#883300", "#553366")
"""Colours of the series in a plot, in the order of the series; ``--series-1`` and so on in the light stylesheet."""

_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_HATCHES = ("", "//", "--", "\\\\", "xx", "||", "++", "/")
_PAPER, _INK = "#ffffff", "#000000"


def figure_and_axes(*, height: float, columns: int = 1) -> tuple[Any, Any]:
    """Return a matplotlib figure, 7.5 × ``height`` inches, and its axes, or a list of axes with a common y axis.

    Errors: MissingDependencyError.
    """
    figure = require("matplotlib.figure", package="matplotlib", extra="report").Figure(
        figsize=(7.5, height), layout="constrained"
    )
    figure.patch.set_visible(False)
    every = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
    for axes in every:
        axes.patch.set_visible(False)
        axes.grid(visible=True, color=_INK, alpha=0.15, lw=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return figure, every[0] if columns == 1 else list(every)


def line_style(number: int, *, marker: bool = False) -> dict[str, Any]:
    """Return matplotlib's arguments for the line of a series: colour, dashes and, if ``marker`` is set, a marker."""
    style = {"color": SERIES[number % len(SERIES)], "linestyle": _DASHES[number % len(_DASHES)]}
    return {**style, "marker": _MARKERS[number % len(_MARKERS)]} if marker else style


def bar_style(number: int) -> dict[str, Any]:
    """Return matplotlib's arguments for the bar of a series: colour, and a hatching in that of the background."""
    style = {"color": SERIES[number % len(SERIES)], "edgecolor": _PAPER, "linewidth": 0.5}
    return {**style, "hatch": _HATCHES[number % len(_HATCHES)]}


def svg(figure: Any, description: str) -> str:
    """Return the SVG text of a figure, without a date: equal figures give equal bytes.

    The colours are CSS variables of ``report.css``, for the dark mode.  description: for readers who do not see it.
    """
    context = require("matplotlib", package="matplotlib", extra="report").rc_context
    file = io.StringIO()
    with context({"svg.fonttype": "none", "svg.hashsalt": "gmmvit", "font.family": "sans-serif"}):
        figure.savefig(file, format="svg", dpi=150, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r"<svg \1", text, count=1)
    text = text.replace(">", f'><desc id="description">{escape(description)}</desc>', 1)
    variables = {_PAPER: f"var(--paper, {_PAPER})", _INK: "currentColor"}
    variables |= {colour: f"var(--series-{number}, {colour})" for number, colour in enumerate(SERIES, start=1)}
    for colour, variable in variables.items():
        text = re.sub(rf'(fill|stroke)(: |="){colour}\b', rf"\1\2{variable}", text)
    return text
