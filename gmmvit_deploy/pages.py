"""The frame and the parts of our self-contained pages: a single file, nothing fetched, for a screen, a phone or paper.

A page answers in the order in which its reader asks: the verdict, in a sentence for whoever signs; what would change
it; pictures and tables; what was skipped, folded away.
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
from gmmvit_deploy.page_style import STYLE
from gmmvit_deploy.writing import new_file, require_free_file

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
    "section",
    "table",
    "verdict_word",
    "written_page",
]

Outcome = Literal["passed", "failed", "undecided", "skipped"]

_SIGNS: Mapping[Outcome, str] = {"passed": "✓", "failed": "✗", "undecided": "?", "skipped": "–"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What whoever signs reads first; plain text throughout.

    word: the verdict in a word or two, such as PASSED.  sentence: the verdict for a reader of nothing else.
    changes: what would change the verdict, a line each: reasons to remove, limits that are near, what it covers.
    """

    outcome: Outcome
    word: str
    sentence: str
    changes: tuple[str, ...]


def page(*, kind: str, title: str, summary: Summary, sections: Iterable[str], style: str = "") -> str:
    """Return the HTML text of a whole page.

    kind: such as "Parity report".  title: plain text.  sections: HTML.  style: CSS after `STYLE`.
    """
    changes = section("What would change it", items(summary.changes)) if summary.changes else ""
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
    """A verdict as HTML: colour, a sign and a word, so that no reader depends on the colour.

    word: plain text; the outcome's own name by default.
    """
    sign = f'<span aria-hidden="true">{_SIGNS[outcome]}</span>'
    return f'<span class="word {outcome}">{sign} {escape(word or outcome)}</span>'


def section(title: str, *content: str) -> str:
    """title: plain text.  content: HTML; without any of it, the section is left out."""
    body = "".join(content)
    return f"<section><h2>{escape(title)}</h2>{body}</section>\n" if body else ""


def items(lines: Iterable[str]) -> str:
    """Plain text → a list, or nothing for no lines."""
    entries = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{entries}</ul>" if entries else ""


def folded(title: str, count: int, *content: str) -> str:
    """HTML that its reader unfolds, with ``count`` behind the title.  Nothing for a count of 0."""
    if not count:
        return ""
    return f"<details><summary>{escape(title)} ({count})</summary>{''.join(content)}</details>\n"


def definitions(rows: Mapping[str, str]) -> str:
    """Plain text → a list of names and what they are."""
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in rows.items()) + "</dl>"


def plots(figures: Iterable[str]) -> str:
    """Figures side by side, as far as there is room.  Nothing for no figures."""
    body = "".join(figures)
    return f'<div class="plots">{body}</div>' if body else ""


def figure(svg: str, title: str, caption: str) -> str:
    """A plot with its title and caption, both plain text.

    svg: as `gmmvit_deploy.plotting.svg` returns it, with a description in words.  title: different for every figure of
    a page, since the names inside the SVG are made unique with it.
    """
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    named = svg.replace(
        "<svg ", '<svg role="img" aria-labelledby="NAME-title" aria-describedby="NAME-description" ', 1
    ).replace(">", f'><title id="title">{escape(title)}</title>', 1)
    named = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", named).replace('="NAME-', f'="{name}-')
    return f"<figure>{named}<figcaption><b>{escape(title)}</b>{escape(caption)}</figcaption></figure>"


_NUMBER = re.compile(r"[+−-]?[\d.,]+(e[+-]?\d+)?%?")
_LONG = 40
"""Characters in a cell from which on its lines are broken."""


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, row_head: int = 0) -> str:
    """caption, head: plain text.  rows: of HTML.  row_head: the column that names its row."""
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
    # Focusable, so that the arrow keys scroll a table that is wider than its window.
    return (
        f'<div class="scroll" role="group" aria-label="{escape(caption)}" tabindex="0"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


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
    """Write a page to ``path``, whole or not at all.  Errors: InputError on another suffix; OutputError."""
    require_page(path, force=force, plots=False)
    with new_file(path, force=force) as file:
        file.write(html.encode())


def require_page(path: Path, *, force: bool, plots: bool = True) -> None:
    """Check before the work that a page can be written to ``path``.

    plots: whether the page has any.
    Errors: InputError on another suffix; OutputError; MissingDependencyError without matplotlib, if there are plots.
    """
    if path.suffix.lower() != ".html":
        raise InputError(f"{path}: a report is a .html page", hint=f"type {path.with_suffix('.html')}")
    if plots:
        require("matplotlib", package="matplotlib", extra="report")
    require_free_file(path, force=force)
