"""The parts of our pages: escaped, named for screen readers, and distinct for everybody."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from gmmvit_deploy.errors import InputError, OutputError
from gmmvit_deploy.reports import pages
from gmmvit_deploy.reports.pages import Outcome, Summary, figure, rendered, require_page, written_page
from gmmvit_deploy.reports.plotting import SERIES, bar_style, figure_and_axes, line_style, svg
from tests.browser import accessibility_problems
from tests.pages import parsed, require_readable_page


def a_plot(description: str = "A line from 1 to 2, and a bar of 3.") -> str:
    drawing, axes = figure_and_axes(height=2)
    axes.plot([0, 1], [1, 2], **line_style(0, marker=True))
    axes.bar([0], [3], **bar_style(1))
    return svg(drawing, description)


TEMPLATE = """{% extends "reports/templates/report.html" %}
{% import "reports/templates/parts.html" as parts %}
{% block kind %}Test report{% endblock %}
{% block content %}
{% call parts.section("Pictures") %}{{ parts.plots(figures) }}{% endcall %}
{% call parts.section("Numbers") %}{{ parts.table("Some <numbers>", ["name", "number", "word"], rows) }}{% endcall %}
{% call parts.section("Empty") %}{{ parts.table("Nothing", ["name"], []) }}{{ parts.items([]) }}{% endcall %}
{% call parts.folded("Skipped", 2) %}{{ parts.items(["this: reason", "that: reason"]) }}{% endcall %}
{% call parts.folded("Never", 0) %}text{% endcall %}
{% endblock %}"""


@functools.cache
def a_page(outcome: Outcome = "passed") -> str:
    template = pages._templates().from_string(TEMPLATE)
    return rendered(
        template,  # type: ignore[arg-type]  # Jinja2 takes a template in place of its name
        title="A <title>",
        summary=Summary(outcome=outcome, word="PASSED", sentence="It works.", changes=("Another <file>",)),
        figures=[figure(a_plot(), f"Plot {n}", "Of <nothing>.") for n in (1, 2)],
        rows=[("a & b", "1.5", "yes"), ("c", "−2e-7", "no")],
    )


def test_a_page_is_readable() -> None:
    tree = require_readable_page(a_page())
    assert [heading.text for heading in tree.all("h2")] == [
        "Verdict: ✓ PASSED",
        "What would change the verdict",
        "Pictures",
        "Numbers",
    ]
    assert tree.all("h1")[0].text == "A <title>"
    assert tree.all("summary")[0].text == "Skipped (2)"
    assert [cell.attributes.get("class") for cell in tree.all("thead")[0].all("th")] == [None, "number", None]


def test_series_differ_in_more_than_colour() -> None:
    numbers = range(len(SERIES))
    assert len({str(line_style(number)["linestyle"]) for number in numbers}) == len(SERIES)
    assert len({line_style(number, marker=True)["marker"] for number in numbers}) == len(SERIES)
    assert len({bar_style(number)["hatch"] for number in numbers}) == len(SERIES)


def test_a_plot_takes_the_colours_of_its_page() -> None:
    plot = a_plot('A "line" & <a bar>.')
    assert plot == a_plot('A "line" & <a bar>.')
    assert "var(--series-1, #0072b2)" in plot
    assert "var(--series-2, #d55e00)" in plot
    assert "stroke: currentColor" in plot
    assert "#000000" not in plot
    assert "&lt;a bar&gt;" in plot
    assert "purl.org" not in plot
    drawn = figure(plot, "Größe: a+b", "Caption").svg
    (picture,) = parsed(drawn).all("svg")
    assert picture.attributes["aria-labelledby"] == "gr-e-a-b-title"
    references = {part.split(")")[0] for part in drawn.split("url(#")[1:]}
    assert references
    assert all(f'id="{name}"' in drawn for name in references)


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected a path that ends in \.html") as refused:
        require_page(tmp_path / "report.pdf", force=False)
    assert refused.value.hint == f"type {tmp_path / 'report.html'}"
    written_page("text", tmp_path / "report.html", force=False)
    with pytest.raises(OutputError, match="exists"):
        written_page("other", tmp_path / "report.html", force=False)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("report.html", "text")]


@pytest.mark.integration
def test_an_accessibility_checker_has_no_complaint_and_can_have(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.html", tmp_path / "bad.html"
    good.write_text(a_page())
    assert accessibility_problems(good) == []
    faint = a_page().replace(' role="img"', "").replace("--ink: #1a1d21", "--ink: #cccccc")
    wide = '<img src="https://gmmvit.invalid/x.png"><div style="width: 5000px">wide</div></main>'
    bad.write_text(faint.replace("</main>", wide))
    problems = " ".join(accessibility_problems(bad))
    for problem in (
        "light: serious: color-contrast",
        "phone: critical: image-alt",
        "dark: request: https://gmmvit.invalid/x.png",
        "pixels wider than its window",
    ):
        assert problem in problems
