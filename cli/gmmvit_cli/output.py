"""Print for commands: data on stdout; notes and errors on stderr, subject to ``--quiet`` and ``--verbose``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import typer

__all__ = ["JSON_OPTION", "MESSAGES", "complain", "note", "print_json", "print_table", "set_verbosity", "verbosity"]

Verbosity = Literal["quiet", "normal", "verbose"]
MESSAGES = "General"
"""Heading in help of the options that every command has."""
JSON_OPTION = typer.Option(False, "--json", help="Print JSON on stdout.", rich_help_panel=MESSAGES)

_verbosity: Verbosity = "normal"


def verbosity() -> Verbosity:
    return _verbosity


def set_verbosity(value: Verbosity) -> None:
    """Set the verbosity once, before a command runs.  ``verbose`` also shows the log records of libraries."""
    global _verbosity
    if value == "verbose":
        from gmmvit_cli.logs import show_logs

        show_logs()
    elif _verbosity == "verbose":
        from gmmvit_cli.logs import hide_logs

        hide_logs()
    _verbosity = value


def print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False, default=str))


def note(text: str) -> None:
    """Print a line on stderr unless ``--quiet`` is given; never part of the data."""
    if _verbosity != "quiet":
        typer.echo(text, err=True)


def complain(text: str) -> None:
    """Print a line of an error on stderr, with ``--quiet`` too."""
    typer.echo(text, err=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """Print a table on stdout; text that looks like markup is printed as it is."""
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
        console = Console(width=200)  # a pipe has no width to fit
    console.print(table)
