"""Build HTML reports.  A report is a single file that loads no other file, for screen, phone and paper.

A report contains, in this order:

1. the verdict, in a sentence for the person who approves the release;
2. reasons that would change the verdict;
3. figures and tables;
4. skipped checks, in sections that are closed until the reader opens them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.extras import require
from gmmvit_deploy.files.writing import new_file, require_free_file
from gmmvit_deploy.reports.page_style import STYLE

__all__ = [
    "Outcome",
    "Summary",
    "definitions",
    "figure",
    "folded",
    "items",
    "page",
    "plots",
    "require_page",
    "scrollable",
    "section",
    "table",
    "verdict_word",
    "written_page",
]

Outcome = Literal["passed", "failed", "undecided", "skipped"]

_SIGNS: Mapping[Outcome, str] = {"passed": "✓", "failed": "✗", "undecided": "?", "skipped": "–"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Summary at the top of a report, as plain text.

    word: the verdict in a word or two, such as PASSED.
    sentence: the verdict in a sentence that readers understand without the rest of the report.
    changes: lines, each with something that would change the verdict: a failure, a limit that is close, or a missing
    check.
    """

    outcome: Outcome
    word: str
    sentence: str
    changes: tuple[str, ...]


def page(*, kind: str, title: str, summary: Summary, sections: Iterable[str], style: str = "") -> str:
    """Return the HTML text of a whole page.

    kind: the kind of the report, such as "Parity report".  title: plain text.  sections: HTML.
    style: CSS to append to `STYLE`.
    """
    changes = section("What would change the verdict", items(summary.changes)) if summary.changes else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}: {escape(summary.word)}</title><style>{STYLE}{style}</style></head>\n"
        f'<body><header><p class="kind">{escape(kind)}</p><h1>{escape(title)}</h1></header>\n<main>\n'
        f'<section class="verdict {summary.outcome}"><h2>Verdict: {verdict_word(summary.outcome, summary.word)}</h2>'
        f"<p>{escape(summary.sentence)}</p></section>\n"
        f"{changes}{''.join(sections)}</main></body></html>\n"
    )


def verdict_word(outcome: Outcome, word: str | None = None) -> str:
    """Return a verdict as HTML with a colour, a sign and a word, so that readers do not depend on the colour.

    word: plain text; by default, the name of the outcome.
    """
    sign = f'<span aria-hidden="true">{_SIGNS[outcome]}</span>'
    return f'<span class="word {outcome}">{sign} {escape(word or outcome)}</span>'


def section(title: str, *content: str) -> str:
    """Return a section, or "" if ``content`` is empty.  title: plain text.  content: HTML."""
    body = "".join(content)
    return f"<section><h2>{escape(title)}</h2>{body}</section>\n" if body else ""


def items(lines: Iterable[str]) -> str:
    """Return lines of plain text as an HTML list, or "" without lines."""
    entries = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{entries}</ul>" if entries else ""


def folded(title: str, count: int, *content: str) -> str:
    """Return a closed section that the reader can open, or "" if ``count`` is 0.

    count: number of entries, shown after the title.  title: plain text.  content: HTML.
    """
    if not count:
        return ""
    return f"<details><summary>{escape(title)} ({count})</summary>{''.join(content)}</details>\n"


def definitions(rows: Mapping[str, str]) -> str:
    """Return an HTML definition list of plain text: name → value."""
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in rows.items()) + "</dl>"


def plots(figures: Iterable[str]) -> str:
    """Return figures side by side, as space permits, or "" without figures."""
    body = "".join(figures)
    return f'<div class="plots">{body}</div>' if body else ""


def figure(svg: str, title: str, caption: str) -> str:
    """Return a plot with its title and caption, both plain text.

    svg: as returned by `gmmvit_deploy.reports.plotting.svg`.
    title: a title that no other figure on the page has, because the IDs inside the SVG are made from the title.
    """
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    named = svg.replace(
        "<svg ", '<svg role="img" aria-labelledby="NAME-title" aria-describedby="NAME-description" ', 1
    ).replace(">", f'><title id="title">{escape(title)}</title>', 1)
    named = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", named).replace('="NAME-', f'="{name}-')
    return f"<figure>{named}<figcaption><b>{escape(title)}</b>{escape(caption)}</figcaption></figure>"


_NUMBER = re.compile(r"[+−-]?[\d.,]+(e[+-]?\d+)?%?")
_LONG = 40
"""Length in characters above which a cell is styled as long text, with line breaks."""


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, row_head: int = 0) -> str:
    """Return a table.  caption, head: plain text.  rows: HTML.  row_head: index of the column with the row headers."""
    numbers = [
        any(_text(row[column]) for row in rows)
        and all(_NUMBER.fullmatch(_text(row[column])) for row in rows if _text(row[column]))
        for column in range(len(head))
    ]
    titles = "".join(
        f'<th scope="col"{_class("number" * number)}>{escape(name)}</th>'
        for name, number in zip(head, numbers, strict=True)
    )
    lines = "".join("<tr>" + "".join(_cells(row, numbers, row_head)) + "</tr>" for row in rows)
    return scrollable(
        caption,
        f"<table><caption>{escape(caption)}</caption><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>",
    )


def scrollable(label: str, content: str) -> str:
    """Return a region that scrolls content wider than the window.  label: plain text.  content: HTML.

    The region can receive the keyboard focus, so that the arrow keys scroll it, and a screen reader reads the label.
    """
    return f'<div class="scroll" role="group" aria-label="{escape(label)}" tabindex="0">{content}</div>'


def _cells(row: Sequence[str], numbers: Sequence[bool], row_head: int) -> Iterable[str]:
    for column, (cell, number) in enumerate(zip(row, numbers, strict=True)):
        if column == row_head:
            yield f'<th scope="row"{_class("number" * number)}>{cell}</th>'
        else:
            kind = "number" if number else "long" if len(_text(cell)) > _LONG else ""
            yield f"<td{_class(kind)}>{cell}</td>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def _text(cell: str) -> str:
    return re.sub(r"<[^>]*>", "", cell)


def written_page(html: str, path: Path, *, force: bool) -> None:
    """Write a page to ``path``, completely or not at all.  Errors: as for `require_page` without plots."""
    require_page(path, force=force, plots=False)
    with new_file(path, force=force) as file:
        file.write(html.encode())


def require_page(path: Path, *, force: bool, plots: bool = True) -> None:
    """Check before work begins that a page can be written to ``path``.

    plots: True if the page has plots, which need matplotlib.
    Errors:
        InputError: the suffix of ``path`` is not .html.
        OutputError: ``path`` exists and ``force`` is False, or the folder of ``path`` does not exist.
        MissingDependencyError: the page has plots, and matplotlib is not installed.
    """
    if path.suffix.lower() != ".html":
        raise InputError(
            f"{path}: expected a path that ends in .html for the report", hint=f"type {path.with_suffix('.html')}"
        )
    if plots:
        require("matplotlib", package="matplotlib", extra="report")
    require_free_file(path, force=force)
