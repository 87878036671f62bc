"""Declare options: under a heading of the help, checked before any work, completed by the shell."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from gmmvit_deploy.arguments import Refusals
from gmmvit_deploy.errors import InputError


def listed(names: Sequence[str]) -> str:
    """Join names as ``a, b or c``."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


@dataclass(frozen=True, slots=True)
class Panel:
    """A heading of the help: ``rich_help_panel`` of typer.  Its methods return typer's arguments and options.

    The name of an option is that of its parameter unless ``name`` states it.  more: arguments of typer.
    """

    title: str

    def argument(self, metavar: str, text: str, *, default: Any = ..., **more: Any) -> Any:
        """Return an argument; it is required unless there is a default."""
        return typer.Argument(default, metavar=metavar, help=text, rich_help_panel=self.title, **more)

    def flag(self, name: str, text: str, *, default: Any = False, **more: Any) -> Any:
        """Return an option without a value.  name: ``--yes``, ``-y,--yes`` or ``--yes/--no``."""
        return typer.Option(default, *name.split(","), help=text, rich_help_panel=self.title, **more)

    def option(
        self,
        metavar: str,
        text: str,
        *,
        default: Any = None,
        name: str = "",
        names: Sequence[str] = (),
        must_exist: bool = False,
        parser: Callable[[Any], Any] = str,
        listing: Callable[[], str] | None = None,
        **more: Any,
    ) -> Any:
        """Return an option with a value; it is required if the default is ``...``.

        names: the values that are allowed, which the shell completes; any other value is an InputError.
        must_exist: True for a path of an input; a missing file or folder is an InputError.
        parser: text, or the texts of an option that may be repeated → the value, or InputError.
        listing: returns what the value ``help`` prints.
        `Command` raises the errors of all options at once; until then, a refused value is another that fits, or None.
        """

        def check(context: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
            if listing is not None and "help" in (value if isinstance(value, (list, tuple)) else [value]):
                typer.echo(listing())
                raise typer.Exit
            # In place of a refused value, so that the command's own checks name no other error.
            otherwise = value if must_exist else default if isinstance(default, int | float) else None
            fitting = names[0] if names else otherwise
            with refusals_of(context).collected():
                fitting = parse(param, value)
            return fitting  # noqa: RET504  # an error leaves out the assignment

        def parse(param: typer.CallbackParam, value: Any) -> Any:
            option = param.opts[-1]
            if isinstance(value, float) and math.isnan(value):  # no comparison with it is true, so none would refuse it
                raise InputError(f"{option}: expected a number, got {value}")
            if names and value is not None and value not in names:
                expected = f"a name that {option} help lists" if listing else listed(names)
                raise InputError(
                    f"{option}: expected {expected}, got {value!r}", hint=f"for example, type {option} {names[0]}"
                )
            if must_exist and value is not None and not Path(value).exists():
                unset = f", or set or unset {param.envvar}" if param.envvar else ""
                raise InputError(
                    f"{option} {value}: no such file or folder", hint=f"type {option} and a path that exists{unset}"
                )
            return value if parser is str or value is None else parser(value)

        if names:
            more |= {"autocompletion": completion(names)}
        if names or parser is not str:  # typer would refuse other values of a Literal itself, in words of its own
            more |= {"parser": str}
        return typer.Option(
            default,
            *filter(None, name.split(",")),
            metavar=metavar,
            help=text,
            rich_help_panel=self.title,
            callback=check,
            **more,
        )


def refusals_of(context: typer.Context) -> Refusals:
    """Return what was refused while the options of a command were read."""
    refusals: Refusals = context.meta.setdefault(f"{__name__}.refusals", Refusals())
    return refusals


def completion(names: Sequence[str], *, several: bool = False) -> Callable[[str], list[str]]:
    """Return the shell completion of a name.  several: of the last name of a list separated by commas."""

    def completions(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if several else ("", "", incomplete)
        return [f"{before}{comma}{n}" for n in names if n.startswith(last) and n not in before.split(",")]

    return completions


INPUT, MODEL, OUTPUT, PRECISION, TARGET = map(Panel, ("Input", "Model", "Output", "Precision", "Server"))
GENERAL = Panel("General")
"""The options that every command has."""


def output_option(metavar: str, text: str, *, default: Any = ..., **more: Any) -> Any:
    """Return the option ``--output``; it is required unless there is a default.

    If its parameter is ``out``, `Command` refuses a path that exists, unless ``--force`` is given.
    """
    return OUTPUT.option(metavar, text, default=default, name="-o,--output", **more)
