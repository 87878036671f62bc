"""What commands print with: data on stdout, everything else on stderr."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

__all__ = ["JSON_OPTION", "note", "phases", "print_json", "print_table", "progress", "working"]

JSON_OPTION = typer.Option(False, "--json", help="Print JSON on stdout.")


def print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False, default=str))


def note(text: str) -> None:
    """A line for the person at the terminal; never part of the data."""
    typer.echo(text, err=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """A table on stdout; text that looks like markup is printed as it is."""
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
        table.add_column(column, overflow="fold")  # nothing is ever cut: hashes and paths are for copying
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a pipe has no width to fit
    console.print(table)


@contextmanager
def working(description: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr while the block runs, on a terminal only.  Yields a setter of its text."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(description) as status:
        yield lambda text: status.update(text)


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr while the block runs, on a terminal only.  Yields a function that advances it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda count: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda count: bar.advance(task, count)


@contextmanager
def phases(description: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr for work in phases, on a terminal only.  Yields ``told(phase, done, steps)``."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda phase, done, steps: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=None)
        yield lambda phase, done, steps: bar.update(task, description=phase, completed=done, total=steps)
