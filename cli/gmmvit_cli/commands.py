"""Commands that are imported only when needed, and help that groups commands by job and options by subject."""

from __future__ import annotations

import gc
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from gmmvit_cli.output import set_verbosity
from gmmvit_cli.panels import GENERAL, refusals_of
from gmmvit_deploy.errors import GmmvitError, InputError
from gmmvit_deploy.files.writing import require_free, require_free_file

JOBS: Mapping[str, Mapping[str, str]] = {
    "Start here": {"demo": "Train, export, serve and measure a small model in a single run."},
    "Inspect": {"inspect": "Describe a checkpoint: architecture, sizes, masks and problems."},
    "Train": {"train": "Train a preset or a model of timm, with or without masks."},
    "Export and build": {
        "export": "Export a checkpoint to ONNX, and compare the graph with PyTorch.",
        "convert": "Add fp16, bf16, int8 or fp8 graphs to a bundle.",
        "build": "Build a TensorRT engine, and report how each attention layer runs.",
    },
    "Check and measure": {
        "parity": "Compare runners with PyTorch: logits, classes and accuracy.",
        "bench": "Measure the latency and throughput of runners.",
        "optimize": "Choose the fastest runner and precision whose accuracy holds.",
    },
    "Serve": {
        "repository": "Write a Triton model repository from a bundle.",
        "serve": "Serve a bundle with Triton until Ctrl-C or SIGTERM.",
        "rollout": "Replace the bundle of a running service, without lost requests.",
        "gateway": "Write a configuration for your own HAProxy in front of Triton.",
        "manifests": "Write manifests for Kubernetes.",
        "pack": "Write the build context of a model's image.",
        "classify": "Classify images with a Triton server, or locally with a bundle.",
        "tune": "Find the fastest server settings within a latency limit.",
    },
    "Check this machine": {"doctor": "Show what works on this machine, and how to install the rest."},
}
"""Job → its commands, each with its summary. The command ``NAME`` is the function ``NAME`` of the module
``gmmvit_cli.NAME``; its docstring continues the summary, and ``EXAMPLE`` of the module shows its use.
``SHARED`` lists functions that declare the options that the command shares with others."""

SUMMARIES: Mapping[str, str] = {name: summary for names in JOBS.values() for name, summary in names.items()}

_LEFT_COLUMN = 28  # wider names of options stand on a line of their own
_SHOWN_DEFAULT = re.compile(r"\[default: \((.*)\)")  # typer puts a default in words into parentheses
_COMPLETION_HELP = {
    "--install-completion": "Install completion of commands and options in the current shell.",
    "--show-completion": "Print the completion script instead of installing it.",
}
_SHOWN_RANGE = re.compile(r"(\[|; )(\d+)<=x<=(\d+)\]")
_SHOWN_MINIMUM = re.compile(r"(\[|; )x>=(\d+)\]")


def _module_of(name: str) -> Any:
    return importlib.import_module(f"gmmvit_cli.{name}")


def _write_definitions(formatter: Any, rows: Sequence[tuple[str, str]]) -> None:
    """Write two columns without breaking a name such as ``tiny-imagenet`` at the hyphen, as the formatter would."""
    indent = " " * (formatter.current_indent + _LEFT_COLUMN)
    for name, text in rows:
        text = _SHOWN_DEFAULT.sub(r"[default: \1", text.replace("\\[", "["))  # early typer escapes brackets for rich
        text = _SHOWN_MINIMUM.sub(r"\1minimum \2]", _SHOWN_RANGE.sub(r"\1\2 to \3]", text))
        lines = textwrap.wrap(text, formatter.width - len(indent), break_on_hyphens=False) or [""]
        left = f"{'':>{formatter.current_indent}}{name}"
        if len(left) + 2 > len(indent):
            formatter.write(f"{left}\n")
            left = ""
        formatter.write(f"{left:<{len(indent)}}{lines[0]}\n")
        for line in lines[1:]:
            formatter.write(f"{indent}{line}\n")


def typing_hint(name: str) -> str:
    """Return the hint for missing arguments of a command: an example, and how to list all options."""
    example = next(line for line in _module_of(name).EXAMPLE.splitlines() if not line.startswith("#"))
    return f"for example: {example}; all options: gmmvit {name} --help"


def help_hint(name: str) -> str:
    """Return the hint for an error of a command; the message of the error states what was expected."""
    return f"type gmmvit {name} --help to read what each option means"


class Command(TyperCommand):
    """A command whose help shows an example, then its options, grouped by ``rich_help_panel``."""

    example = ""
    collects = False
    """True: the function raises what it refuses itself together with what `parse_args` refused (`refusals_of`)."""
    shared: frozenset[str] = frozenset()
    """Parameters that several commands share, which the function reads from its context."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Example"):
            for line in self.example.splitlines():
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                if param.param_type_name == "argument":
                    record = (record[0].partition(" <")[0], record[1])  # not its type in Python
                panel = getattr(param, "rich_help_panel", None)
                panels.setdefault(panel if isinstance(panel, str) else GENERAL.title, []).append(record)
        for panel in sorted(panels, key=GENERAL.title.__eq__):  # the options of every command come last
            with formatter.section(panel):
                _write_definitions(formatter, panels[panel])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        if ctx.resilient_parsing:  # the values are not used: help and completion
            return rest
        given, refusals = ctx.params, refusals_of(ctx)
        if given.get("out") is not None and not given.get("resume"):
            with refusals.collected():
                instead = "add --resume to continue a run" if "resume" in given else ""
                require_free(Path(given["out"]), force=given["force"], instead=instead)
        for param in self.params:
            if param.metavar in ("FILE.html", "FILE.json", "FILE.npz") and given[param.name] is not None:
                from gmmvit_deploy.reports.pages import require_page

                with refusals.collected():
                    check = require_page if param.metavar == "FILE.html" else require_free_file
                    check(given[param.name], force=given["force"])
        if not self.collects:
            refusals.raise_all()
        return rest

    def invoke(self, ctx: Any) -> Any:
        quiet, verbose = ctx.params["quiet"], ctx.params["verbose"]
        if quiet and verbose:
            raise InputError("--quiet and --verbose exclude each other", hint="type --quiet or --verbose, not both")
        set_verbosity("quiet" if quiet else "verbose" if verbose else "normal")
        return ctx.invoke(self.callback, **{name: ctx.params[name] for name in ctx.params.keys() - self.shared})


def _common_options(
    quiet: bool = GENERAL.flag("-q,--quiet", "Print data and errors only."),
    verbose: bool = GENERAL.flag("-v,--verbose", "Print every step, and log messages of libraries."),
) -> None:
    """Declare the options that every command has, which `Command.invoke` reads."""


def _command(name: str) -> Any:
    module = _module_of(name)
    function = getattr(module, name)
    command = _single(function, help=f"{SUMMARIES[name]}\n\n{inspect.getdoc(function)}")
    command.example = module.EXAMPLE
    command.collects = getattr(module, "COLLECTS", False)
    for options in (*getattr(module, "SHARED", ()), _common_options):
        params = _single(options).params
        command.params += params
        command.shared |= {param.name for param in params}
    return command


def _single(function: Any, **more: Any) -> Any:
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(function.__name__, cls=Command, **more)(function)
    return typer.main.get_command(app)


class Commands(TyperGroup):
    """The group of all commands in `JOBS`: a command is imported when it is called, or when its help is printed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(SUMMARIES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in SUMMARIES:
            return None
        if cmd_name not in self.commands:
            self.commands[cmd_name] = _command(cmd_name)
        return self.commands[cmd_name]

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except GmmvitError as exc:
            exc.args = (_as_typed(str(exc), self.commands[ctx.invoked_subcommand].params),)
            if exc.hint == InputError.default_hint:
                exc.hint = help_hint(ctx.invoked_subcommand)
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in SUMMARIES and not args[0].startswith("-"):
            ctx.fail(f"there is no command {args[0]!r}{_nearest(args[0])}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, SUMMARIES))
        for job, names in JOBS.items():
            with formatter.section(job):
                for name, summary in names.items():
                    formatter.write(f"{'':>{formatter.current_indent}}{name:<{width}}  {summary}\n")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        records = [record for param in self.get_params(ctx) if (record := param.get_help_record(ctx))]
        records = [(option, _COMPLETION_HELP.get(option.split()[0], text)) for option, text in records]
        with formatter.section("Options"):
            _write_definitions(formatter, records)


def _as_typed(message: str, params: Sequence[Any]) -> str:
    """Name the options that were typed in place of the library's arguments: ``gate: …`` → ``--gate: …``, in each line.

    The parameter of a command has the name of the library's argument.
    """
    words = [word.partition("=")[0] for word in sys.argv]
    options: dict[str, str] = {param.name: param.opts[-1] for param in params if not {*words}.isdisjoint(param.opts)}
    options |= {name: f"--set {name}" for option, name in pairwise(words) if option == "--set"}
    return re.sub(r"(?m)(?<=^- )\w+(?=:)|^\w+(?=:)", lambda match: options.get(match[0], match[0]), message)


def _nearest(name: str) -> str:
    from difflib import get_close_matches

    nearest = get_close_matches(name, SUMMARIES, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def collect_garbage_rarely() -> None:
    """Let Python's garbage collector run rarely, in a command that ends after its work.

    PyTorch and its exporter create millions of objects that live until the process ends. The collector reads them again
    and again, and frees next to nothing: in an export of a ViT, it takes more than a quarter of the process's time.
    Not for a service: a cycle may hold the body of a request, and would hold it for thousands of requests.
    """
    gc.set_threshold(100_000, 50, 100)  # containers, and younger collections; Python 3.11's own: 700, 10, 10
