"""Show the log records of libraries with ``--verbose``."""

from __future__ import annotations

import logging

import typer

__all__ = ["hide_logs", "show_logs"]


class _Stderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(self.format(record), err=True)


_HANDLER = _Stderr()
_HANDLER.setFormatter(logging.Formatter("%(name)s: %(message)s"))


def show_logs() -> None:
    logging.getLogger().addHandler(_HANDLER)
    logging.getLogger().setLevel(logging.INFO)


def hide_logs() -> None:
    logging.getLogger().removeHandler(_HANDLER)
    logging.getLogger().setLevel(logging.WARNING)
