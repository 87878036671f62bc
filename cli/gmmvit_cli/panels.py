"""Declare options: under a heading of the help, checked before any work, completed by the shell."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

import typer
from typer.models import ParameterInfo

from gmmvit_deploy.errors import InputError


def listed(names: Sequence[str]) -> str:
    """Join names as ``a, b or c``."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


@dataclass(frozen=True, slots=True)
class Panel:
    """A heading of the help.  Its methods return the defaults of a command's parameters, which typer reads.

    The name of an option is that of its parameter unless ``name`` states it.  more: arguments of typer.
    """

    title: str

    def argument(self, metavar: str, text: str, *, default: Any = ..., **more: Any) -> Any:
        """Return an argument; it is required unless there is a default."""
        return typer.Argument(default, metavar=metavar, help=text, rich_help_panel=self.title, **more)

    def flag(self, name: str, text: str, *, default: bool | None = False, **more: Any) -> Any:
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
        several: bool = False,
        read: Callable[[Any], object] | None = None,
        complete: Callable[[str], list[str]] | None = None,
        must_exist: bool = False,
        **more: Any,
    ) -> Any:
        """Return an option with a value; it is required if the default is ``...``.

        names: the values, which the shell completes; without ``read``, any other value is an InputError.
        several: True for a list of names separated by commas.
        read: called with the value before any work, for its errors.
        complete: the completion of a value that is no name.
        must_exist: True for a path of an input; a missing file or folder is an InputError.
        """

        def check(param: typer.CallbackParam, value: Any) -> Any:
            if value is None:
                return value
            if isinstance(value, float) and math.isnan(value):  # no comparison with it is true, so none would refuse it
                raise InputError(f"{param.opts[-1]}: expected a number, got {value}")
            if read is not None:
                read(value)
            elif names and value not in names:
                raise InputError(
                    f"{param.opts[-1]}: expected {listed(names)}, got {value!r}",
                    hint=f"for example, type {param.opts[-1]} {names[0]}",
                )
            if must_exist and not Path(value).exists():
                raise InputError(
                    f"{param.opts[-1]} {value}: no such file or folder",
                    hint=f"type {param.opts[-1]} and a path that exists",
                )
            return value

        return typer.Option(
            default,
            *filter(None, name.split(",")),
            metavar=metavar,
            help=text,
            rich_help_panel=self.title,
            callback=check,
            autocompletion=complete or (completion(names, several=several) if names else None),
            **more,
        )


def completion(names: Sequence[str], *, several: bool = False) -> Callable[[str], list[str]]:
    """Return the shell completion of a name.  several: of the last name of a list separated by commas."""

    def completions(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if several else ("", "", incomplete)
        return [f"{before}{comma}{n}" for n in names if n.startswith(last) and n not in before.split(",")]

    return completions


INPUT, MODEL, OUTPUT, PRECISION, TARGET = map(Panel, ("Input", "Model", "Output", "Precision", "Server"))
GENERAL = Panel("General")
"""The options that every command has."""

FORCE = OUTPUT.flag("--force", "Replace the output if it exists.")
JSON_OPTION = GENERAL.flag("--json", "Print JSON on stdout.")


def output_option(metavar: str, text: str, *, default: Any = ..., **more: Any) -> Any:
    """Return the option ``--output``; it is required unless there is a default."""
    return OUTPUT.option(metavar, text, default=default, name="-o,--output", **more)


@dataclass(frozen=True, slots=True)
class _Together:
    read: Callable[..., Any]


def together(read: Callable[..., Any]) -> Any:
    """Return the default of a parameter that stands for all options that the parameters of ``read`` declare.

    The command gets a partial of ``read`` with the values that the user typed, and calls it with the arguments of
    ``read`` that are no options.
    """
    return _Together(read)


class _Group(partial[Any]):
    """A function with the values of its options.  typed: the names of the options that the user typed."""

    typed: frozenset[str] = frozenset()


def typed(group: partial[Any]) -> list[str]:
    """Return the options of `together` that the user typed: ``--keys``."""
    options = inspect.signature(group.func).parameters
    return [
        (*options[name].default.param_decls, f"--{name.replace('_', '-')}")[0].partition("/")[0]
        for name in group.keywords
        if isinstance(group, _Group) and name in group.typed
    ]


def with_single_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with the single options in place of each parameter that stands for several, as typer needs.

    Only the types of options are evaluated: other annotations may name modules that are not imported.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    for parameter in inspect.signature(function).parameters.values():
        if isinstance(parameter.default, _Together):
            options = _options(parameter.default.read)
            groups[parameter.name] = parameter.default.read, [option.name for option in options]
            parameters += options
        else:
            parameters += _options(function, parameter.name)

    def command(context: typer.Context, **values: Any) -> Any:
        for name, (read, options) in groups.items():
            group = _Group(read, **{option: values.pop(option) for option in options})
            group.typed = frozenset(option for option in options if _is_typed(context, option))
            values[name] = group
        return function(**values)

    own_context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters.append(own_context)

    update_wrapper(command, function)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    del command.__wrapped__  # type: ignore[attr-defined]  # typer would read its annotations
    return command


def _is_typed(context: typer.Context, option: str) -> bool:
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def _options(function: Callable[..., Any], only: str = "") -> list[inspect.Parameter]:
    """Return the parameters of a function that are options, with their types, or a single parameter."""
    return [
        parameter.replace(
            annotation=eval(parameter.annotation, inspect.unwrap(function).__globals__),  # noqa: S307 - our own text
            kind=inspect.Parameter.KEYWORD_ONLY,
        )
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name == only or (not only and isinstance(parameter.default, ParameterInfo))
    ]
