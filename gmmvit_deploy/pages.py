"""The frame of our self-contained pages: one file, nothing fetched, for a screen, a phone or paper."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.extras import require
from gmmvit_deploy.writing import new_file, require_free_file

__all__ = ["definitions", "figure", "page", "require_page", "table", "written_page"]

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto; max-width: 75rem;
       padding: 1rem; }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .25rem; border-top: 1px solid #ccc; padding-top: 1rem; }
p, dd { max-width: 60ch; } .quiet { color: #555; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dt { font-weight: 600; } dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 0; break-inside: avoid; border: 1px solid #ddd; border-radius: 6px; padding: .6rem; }
figcaption { font-size: .85rem; margin-top: .4rem; } figcaption b { display: block; font-size: .95rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; }
td, th { padding: .15rem .6rem .15rem 0; text-align: right; } th:first-child, td:first-child { text-align: left; }
.warning, .error { color: #8a1c00; font-weight: 600; }
@media print { body { font-size: 11px; max-width: none; } }
"""


def page(title: str, body: str, *, style: str = "") -> str:
    """title: plain text.  body: HTML.  style: CSS behind our own."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}{style}</style></head>\n<body>{body}</body></html>\n"
    )


def definitions(rows: dict[str, str]) -> str:
    """Plain text → a list of names and what they are."""
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in rows.items()) + "</dl>"


def figure(svg: str, title: str, caption: str) -> str:
    """svg: as it is.  title, caption: plain text."""
    return f"<figure>{svg}<figcaption><b>{escape(title)}</b>{escape(caption)}</figcaption></figure>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """head: plain text.  rows: of HTML."""
    titles = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{titles}</tr>{lines}</table></div>'


def written_page(html: str, path: Path, *, force: bool) -> None:
    """Put a page where it is wanted, whole or not at all.  Errors: as `require_page`; OutputError."""
    require_page(path, force=force)
    with new_file(path, force=force) as file:
        file.write(html.encode())


def require_page(path: Path, *, force: bool) -> None:
    """Whether a page can be written there at all, before the work is done.

    Errors: InputError on another suffix; OutputError; MissingDependencyError without matplotlib.
    """
    if path.suffix.lower() != ".html":
        raise InputError(f"{path}: a report is a .html page")
    require("matplotlib", package="matplotlib", extra="report")
    require_free_file(path, force=force)
