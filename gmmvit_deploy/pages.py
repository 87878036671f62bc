"""The frame of our self-contained pages: one file, nothing fetched, for a screen, a phone or paper."""

from __future__ import annotations

from html import escape

__all__ = ["definitions", "page"]

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
