"""Build HTML reports from templates.  A report is a single file that loads no other file, for screen, phone and paper.

It has the verdict in a sentence for the person who approves the release; what would change it; figures and tables; and
closed sections with the skipped checks. ``templates/report.html`` is the layout of all reports, and
``templates/parts.html`` has their parts; the template of a report is beside the module that collects its values.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from gmmvit_deploy.counts import counted
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.files.writing import new_file, require_free_file

if TYPE_CHECKING:
    from PIL import Image

_COLOURS = 64

Outcome = Literal["passed", "failed", "undecided", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Summary at the top of a report, as plain text.

    word: such as PASSED.  sentence: the verdict for a reader of nothing else.
    changes: what would change the verdict: a failure, a limit that is close, a missing check.
    """

    outcome: Outcome
    word: str
    sentence: str
    changes: tuple[str, ...]


class VerdictWord(NamedTuple):
    """A verdict in a cell of a table: the page gives the word a colour and a sign."""

    outcome: Outcome
    word: str


class Plot(NamedTuple):
    """A plot with its title and caption, both plain text.  svg: trusted text, as matplotlib writes it."""

    svg: str
    title: str
    caption: str


class Figure(NamedTuple):
    """Pictures side by side, with a title and a caption of some lines, both plain text.

    pictures: (description for a screen reader, picture).  layout: the width of the pictures; a plot is smooth.
    all_colours: False reduces a picture to 64 colours, so that a page with hundreds of pictures is small.
    """

    title: str
    caption: tuple[str, ...]
    pictures: tuple[tuple[str, Image.Image], ...]
    layout: Literal["pair", "single", "sheet", "plot"] = "pair"
    all_colours: bool = False


@cache
def _templates() -> Environment:
    """Return the templates of all pages.  The name of a template is its path in the package."""
    environment = Environment(
        loader=PackageLoader("gmmvit_deploy", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"counted": counted, "numeric_columns": _numeric_columns, "png_url": _png_url}
    return environment


def rendered(template: str, *, title: str, summary: Summary, **values: object) -> str:
    """Return the HTML text of a whole report.

    template: extends ``reports/templates/report.html``.  values: what the template reads in addition.
    """
    return _templates().get_template(template).render(title=title, summary=summary, **values)


def figure(svg: str, title: str, caption: str) -> Plot:
    """Return a plot of `plotting.svg` with IDs made from its title, which is unique on the page, for screen readers."""
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    named = svg.replace(
        "<svg ", '<svg role="img" aria-labelledby="NAME-title" aria-describedby="NAME-description" ', 1
    ).replace(">", f'><title id="title">{escape(title)}</title>', 1)
    named = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", named).replace('="NAME-', f'="{name}-')
    return Plot(named, title, caption)


_NUMBER = re.compile(r"[+−-]?[\d.,]+(e[+-]?\d+)?%?")


def _numeric_columns(rows: Sequence[Sequence[str | VerdictWord]]) -> list[bool]:
    """Return for each column of a table if it holds numbers and empty cells only, and at least one number."""
    columns = [[cell for cell in column if cell] for column in zip(*rows, strict=True)]
    return [
        bool(column) and all(isinstance(cell, str) and _NUMBER.fullmatch(cell) for cell in column) for column in columns
    ]


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _png_url(image: Image.Image, *, all_colours: bool = True) -> str:
    """Return an image as the URL of PNG data.  all_colours: False reduces the image to 64 colours."""
    data = base64.b64encode(png(image if all_colours else image.quantize(_COLOURS)))
    return f"data:image/png;base64,{data.decode()}"


def written_page(html: str, path: Path, *, force: bool) -> None:
    """Write a page to ``path``, completely or not at all.  Errors: as for `require_page`."""
    require_page(path, force=force)
    with new_file(path, force=force) as file:
        file.write(html.encode())


def require_page(path: Path, *, force: bool) -> None:
    """Check before work begins that a page can be written to ``path``.

    Errors: InputError for another suffix than .html; OutputError as `require_free_file`.
    """
    if path.suffix.lower() != ".html":
        raise InputError(
            f"{path}: expected a path that ends in .html for the report", hint=f"type {path.with_suffix('.html')}"
        )
    require_free_file(path, force=force)
