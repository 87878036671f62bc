"""A hostile input, and what may be answered to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

KINDS = ("checkpoint", "bundle", "image", "http", "grpc")

REFUSED, ANSWERED, FAILED, CLOSED, CRASH, HANG = "refused", "answered", "failed", "closed", "crash", "hang"
"""Refused: an error for the client, with a reason. Answered: taken as valid. Failed: the server's own error (HTTP 5xx,
gRPC INTERNAL or UNKNOWN). Closed: the connection was closed without an answer. Crash: the program ended, or stated an
unexpected error. Hang: no answer within the time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A hostile input.

    kind: a name in `KINDS`.  name: what is hostile, unique within its kind.
    make: for a checkpoint or a bundle, writes it into an empty folder, and returns the path; for an image, returns the
    bytes of the images of a request; for HTTP, returns the pieces to send; for gRPC, returns (method, message).
    may_be_answered: True if the input is unusual but valid, so that an answer is right.
    """

    kind: str
    name: str
    make: Callable[..., Any]
    may_be_answered: bool = False


def cases(kind: str, table: Mapping[str, Callable[..., Any]], *, may_be_answered: bool = False) -> tuple[Case, ...]:
    """Return a case for each line of a table: name → ``make``."""
    return tuple(Case(kind=kind, name=n, make=m, may_be_answered=may_be_answered) for n, m in table.items())


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was answered.

    answer: a name such as `REFUSED`.  reason: the beginning of the text of the answer.  seconds: the time until then.
    """

    answer: str
    reason: str
    seconds: float = 0.0
