"""Entry point: run a command, and convert every error to two lines and an exit status.

0    done
1    an error, or a check that failed: ``Error:`` and ``hint:`` on stderr
2    the command line cannot be read: an unknown command or option, a missing argument, a value of a wrong type
130  interrupted from the keyboard; 143 by SIGTERM
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

import typer

import gmmvit_deploy
from gmmvit_cli.commands import SUMMARIES, Commands, help_hint, typing_hint
from gmmvit_cli.output import print_error
from gmmvit_deploy.errors import GmmvitError
from gmmvit_deploy.inference.cores import limit_libraries

DEBUG_VARIABLE = "GMMVIT_DEBUG"
_START = """Start here:
  gmmvit demo                                train, export, check and serve a small model

With a checkpoint of your own:
  gmmvit export checkpoint.pth -o bundle --dataset cifar10
  gmmvit parity bundle                       compare the export with PyTorch
  gmmvit serve bundle                        answer requests over gRPC and HTTP
  gmmvit classify image.png                  ask the server that is running

All commands:               gmmvit --help
What this machine can run:  gmmvit doctor"""

_HELP = """Export, check, build and serve trained vision transformers, with or without masks on the attention scores.

A bundle is the folder that 'gmmvit export' writes; most other commands read it. A runner is any program that computes
the logits of a bundle: PyTorch, ONNX Runtime, OpenVINO, a TensorRT engine or a Triton server."""

app = typer.Typer(
    name="gmmvit",
    cls=Commands,
    help=_HELP,
    invoke_without_command=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"gmmvit-deploy {gmmvit_deploy.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(_START)


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    # Raise an exception, so that partly written folders are removed and servers are stopped on the way out.
    raise SystemExit(128 + number)


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGTERM, _terminated)
    limit_libraries(os.environ)  # before a command imports NumPy or PyTorch
    try:
        # Typer would print usage errors in its own form.
        status = app(prog_name="gmmvit", standalone_mode=False)
    except GmmvitError as exc:
        _fail(str(exc), exc.hint)
    except BrokenPipeError:
        # The reader of our output closed the pipe; Python would print another error while it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    # Last resort: users see no traceback unless they ask for it.
    except Exception as exc:
        if hasattr(exc, "format_message"):  # a usage error; its class lies in another module in each release of typer
            _fail(*_usage_error(exc), status=2)
        _fail(
            f"unexpected {type(exc).__name__}: {exc}",
            f"this is a defect of gmmvit-deploy; type {DEBUG_VARIABLE}=1 before the command to print the traceback",
        )
    sys.exit(status if isinstance(status, int) else 0)


def _usage_error(exc: Any) -> tuple[str, str]:
    """Return (message, hint) for typer's error about a command line that it cannot read."""
    message = re.sub(r"\s+", " ", str(exc.format_message())).strip().rstrip(".")
    command = getattr(getattr(exc, "ctx", None), "info_name", None)
    if command not in SUMMARIES:  # some errors carry no context
        command = next((word for word in sys.argv[1:] if word in SUMMARIES), None)
    if command is None or message.startswith("there is no command"):
        return message, "type gmmvit --help to list the commands"
    hint = typing_hint(command) if message.startswith("Missing") else help_hint(command)
    return f"gmmvit {command}: {_expected(message, getattr(exc, 'param', None))}", hint


_REASONS = (  # of several releases of typer
    re.compile(r"Invalid value for .*?: Input should be (?P<expected>[^,]*).*"),
    re.compile(r"Invalid value for .*?: \S+ is not (?P<expected>a valid .*|in the range .*)"),
)


def _expected(message: str, param: Any) -> str:
    """Rewrite typer's ``Invalid value for '--batch': Input should be ...`` as ``--batch: expected ..., got 'x'``."""
    match = next(filter(None, (reason.fullmatch(message) for reason in _REASONS)), None)
    if match is None or param is None:
        return message
    expected = re.sub(r"^(?=greater|less|in the range)", "a number ", match["expected"])
    return f"{param.opts[-1]}: expected {expected}{_typed(param.opts)}"


def _typed(options: Sequence[str]) -> str:
    """Return ``, got 'x'`` with the argument after the last of these options, or "" without such an argument."""
    words = sys.argv[1:]
    for number, word in reversed([*enumerate(words)]):
        option, equals, value = word.partition("=")
        if option in options:
            following = words[number + 1] if number + 1 < len(words) else ""
            return f", got {(value if equals else following)!r}"
    return ""


def _fail(message: str, hint: str, *, status: int = 1) -> NoReturn:
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
    print_error(f"Error: {message}")
    if hint:
        print_error(f"hint: {hint}")
    sys.exit(status)


if __name__ == "__main__":
    main()
