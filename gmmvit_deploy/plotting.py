"""What the plots on our pages share: a figure that belongs to no window, and SVG that is the same every time."""

from __future__ import annotations

import io
import re
from typing import Any

from gmmvit_deploy.extras import require

__all__ = ["COLOURS", "figure_and_axes", "svg"]

COLOURS = ("#2a6fbb", "#d1782c", "#3a8f5c", "#8a4f9e", "#b03a48", "#6b6b6b", "#1fa3a3", "#a38a1f")


def figure_and_axes(*, height: float) -> tuple[Any, Any]:
    """7.5 inches wide.  Errors: MissingDependencyError without matplotlib."""
    figure = require("matplotlib.figure", package="matplotlib", extra="report").Figure(
        figsize=(7.5, height), layout="constrained"
    )
    axes = figure.subplots()
    axes.grid(visible=True, color="#e4e4e4", lw=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def svg(figure: Any) -> str:
    """Without date and with names that follow from the content: the same report gives the same bytes."""
    context = require("matplotlib", package="matplotlib", extra="report").rc_context
    file = io.StringIO()
    with context({"svg.fonttype": "none", "svg.hashsalt": "gmmvit", "font.family": "sans-serif"}):
        figure.savefig(file, format="svg", dpi=150, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    return re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r"<svg \1", text, count=1)
