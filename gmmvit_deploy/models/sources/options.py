"""Refuse options that the source of a file does not read: an ignored option would seem to have changed the network."""

from __future__ import annotations

from collections.abc import Iterable

from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.source import CheckpointSource


def check_options(path: str, source: CheckpointSource, hints: LoadHints, names: Iterable[str]) -> None:
    """Check that the source of a file reads every option that the user typed, and that ``--set source`` names it.

    path: the file.  source: the source that was chosen for the file.  hints: the user's own values.
    names: the names of the tensors.
    Errors: CheckpointError for an option that the source does not read, or for the name of another source.
    """
    for hint, typed in hints.own().items():
        if hint not in source.own_hints:
            raise CheckpointError(
                f"{path}: {typed} does not apply to a file of {source.name}",
                hint=f"leave {typed.partition('=')[0]} out",
            )
    if hints.source is not None and not source.is_named(hints.source, names):
        raise CheckpointError(
            f"{path}: --set source={hints.source}, but the names of the tensors are those of {source.name}",
            hint="leave --set source out",
        )


def refuse_own_options(path: str, hints: LoadHints, *, reason: str, allowed: tuple[str, ...] = ()) -> None:
    """Check that the user typed no option for what a file without a source states itself.

    reason: the end of the message, such as "the weights of a bundle, which holds the spec of the model".
    allowed: the fields of `LoadHints` that apply nevertheless.
    Errors: CheckpointError for an option that does not apply.
    """
    typed_source = {} if hints.source is None else {"source": f"--set source={hints.source}"}
    for hint, typed in (*hints.own().items(), *typed_source.items()):
        if hint not in allowed:
            raise CheckpointError(
                f"{path}: {typed} does not apply to {reason}", hint=f"leave {typed.partition('=')[0]} out"
            )
