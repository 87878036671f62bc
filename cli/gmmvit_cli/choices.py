"""Options whose value is a name from a list: checked before any work, completed by the shell, listed in the help.

The names come from modules of the library that import nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from gmmvit_deploy.errors import InputError

__all__ = ["Names", "choice_from", "complete", "complete_list", "listed", "read_by"]

Names = Callable[[], Sequence[str]]
"""A function that returns the names that an option takes, and that imports the list only when it is called."""


def listed(names: Sequence[str]) -> str:
    """Join names as ``a, b or c``."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def choice_from(option: str, names: Names) -> Callable[[str | None], str | None]:
    """Return the callback of an option that takes a single name.  The callback raises InputError on any other text."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in names():
            raise InputError(
                f"{option}: expected {listed(names())}, got {value!r}", hint=f"for example, type {option} {names()[0]}"
            )
        return value

    return check


def read_by(read: Callable[[str], object]) -> Callable[[str | None], str | None]:
    """Return the callback of an option whose text ``read`` checks.  The callback raises the errors of ``read``."""

    def check(value: str | None) -> str | None:
        if value is not None:
            read(value)
        return value

    return check


def complete(names: Names) -> Callable[[str], list[str]]:
    """Return the shell completion of a single name."""

    def completions(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return completions


def complete_list(names: Names) -> Callable[[str], list[str]]:
    """Return the shell completion for a list of names separated by commas; it completes the last name."""

    def completions(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in _without(names(), before) if name.startswith(last)]

    return completions


def _without(names: Sequence[str], before: str) -> Iterator[str]:
    return (name for name in names if name not in before.split(","))
