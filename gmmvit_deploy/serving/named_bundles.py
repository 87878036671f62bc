"""Several bundles in one service or repository, each under a name: ``gmmvit serve shop cats=cats_bundle``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gmmvit_deploy.arguments import Refusals
from gmmvit_deploy.errors import GmmvitError, InputError
from gmmvit_deploy.runtimes.programs.triton import DEFAULT_MODEL
from gmmvit_deploy.serving.options import RepositoryOptions

LeaveOut = Callable[[str, str], None]
"""Called with the name of a bundle that is left out, and with the reason."""


def named_paths(arguments: Sequence[str], name: str = DEFAULT_MODEL) -> dict[str, Path]:
    """Return name → path of arguments PATH or NAME=PATH.

    A path without a name has that of its folder; the only path has ``name``.
    Errors: InputError for an invalid name, for two paths with the same name, and for names of which the models of one
    are called as the other.
    """
    refusals, paths = Refusals(), dict[str, Path]()
    for argument in arguments:
        before, equals, after = argument.partition("=")
        if not equals or Path(argument).exists():
            path = Path(argument)
            before = path.resolve().name if len(arguments) > 1 else name
        else:
            refusals.refuse(not after, f"{argument}: expected NAME=BUNDLE", hint=f"type {before}=BUNDLE")
            path = Path(after)
        try:
            RepositoryOptions(name=before)
        except InputError as exc:
            refusals.refuse(condition=True, message=f"{argument}: {exc}", hint=f"type NAME={path}")
            continue
        hint = f"type NAME={path} with another name"
        refusals.refuse(before in paths, f"{paths.get(before)} and {path} have the same name, {before}", hint=hint)
        paths[before] = path
    for one in paths:
        for other in paths.keys() & {*RepositoryOptions(name=one).models} - {one}:
            hint = f"type NAME={paths[other]} with another name"
            refusals.refuse(condition=True, message=f"{other} is also the name of a model of {one}", hint=hint)
    refusals.raise_all()
    return paths


@contextmanager
def or_left_out(name: str, leave_out: LeaveOut | None) -> Iterator[None]:
    """Call ``leave_out`` for an error of the block; None lets the error through."""
    try:
        yield
    except GmmvitError as exc:
        if leave_out is None:
            raise
        leave_out(name, str(exc))
