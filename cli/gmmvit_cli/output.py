"""Print for commands: data on stdout; notes and errors on stderr, subject to ``--quiet`` and ``--verbose``."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any, Literal

import typer

Verbosity = Literal["quiet", "normal", "verbose"]


class _Stderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(self.format(record), err=True)


_LOGS = _Stderr()
_LOGS.setFormatter(logging.Formatter("%(name)s: %(message)s"))
_verbosity: Verbosity = "normal"


WIDTH = 100
"""Columns of a table that fits most terminals."""


def verbosity() -> Verbosity:
    return _verbosity


def set_verbosity(value: Verbosity) -> None:
    """Set the verbosity once, before a command runs.  ``verbose`` also shows the log records of libraries."""
    global _verbosity
    root = logging.getLogger()
    if value == "verbose":
        root.addHandler(_LOGS)
        root.setLevel(logging.INFO)
    elif _verbosity == "verbose":
        root.removeHandler(_LOGS)
        root.setLevel(logging.WARNING)
    _verbosity = value


def print_json(data: Any) -> None:
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False, default=str)
    # A byte of a file name that is no UTF-8 is written as an escape of JSON, such as \\udcff.
    typer.echo(text.encode("utf-8", "backslashreplace").decode())


def note(text: str) -> None:
    """Print a line on stderr unless ``--quiet`` is given; never part of the data."""
    if _verbosity != "quiet":
        typer.echo(text, err=True)


def print_error(text: str) -> None:
    """Print a line of an error on stderr, with ``--quiet`` too."""
    typer.echo(text, err=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", width: int = 300) -> None:
    """Print a table on stdout; text that looks like markup is printed as it is.  width: the maximum in a pipe."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title or None,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        pad_edge=False,
        show_header=any(columns),
    )
    for column in columns:
        table.add_column(column, overflow="fold")  # fold instead of cutting off: users copy hashes and paths
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=width)  # a pipe has no width to fit
    console.print(table)
