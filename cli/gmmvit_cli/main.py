"""Entry point: collects the commands, and turns every error into two lines and an exit status."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from types import FrameType
from typing import NoReturn

import typer

import gmmvit_deploy
from gmmvit_cli import bench, build, classify, convert, demo, doctor, export, inspect, parity, repository, serve, tune
from gmmvit_deploy.errors import GmmvitError

__all__ = ["app", "main"]

DEBUG_VARIABLE = "GMMVIT_DEBUG"

app = typer.Typer(
    name="gmmvit",
    help="A trained vision transformer with a mask on its attention, taken to production.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, inspect, export, convert, build, parity, bench, tune, repository, serve, classify, doctor):
    name = command.__name__.rpartition(".")[2]
    app.command(name)(getattr(command, name))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gmmvit-deploy {gmmvit_deploy.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    # As an exception, so that half-written folders are removed and servers stopped on the way out.
    raise SystemExit(128 + number)


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGTERM, _terminated)
    try:
        app()
    except GmmvitError as exc:
        _fail(str(exc), exc.hint)
    except BrokenPipeError:
        # The reader of our output went away; Python would complain once more while it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    # The last line of defence: no traceback reaches a user who did not ask for one.
    except Exception as exc:
        _fail(
            f"unexpected {type(exc).__name__}: {exc}",
            f"this is a defect of gmmvit-deploy; {DEBUG_VARIABLE}=1 shows where it happened",
        )


def _fail(message: str, hint: str) -> NoReturn:
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
    typer.echo(f"Error: {message}", err=True)
    if hint:
        typer.echo(f"hint: {hint}", err=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
