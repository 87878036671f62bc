"""Check arguments, and collect what several checks refuse.

The message of a check begins with the argument's name: ``gate: expected …``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any

from gmmvit_deploy.errors import GmmvitError, InputError, ServerError


def require_counts(**values: Any) -> None:
    """Check that each value is None or a whole number of at least 1.  Errors: InputError."""
    refusals = Refusals()
    for name, value in values.items():
        with refusals.collected():
            if value is not None and not (isinstance(value, Integral) and int(value) >= 1):
                raise InputError(f"{name}: expected a whole number of at least 1, got {value!r}")
    refusals.raise_all()


def require_number(name: str, value: Any, expected: str, holds: Callable[[float], bool]) -> None:
    """Check that a value is None or a number that ``holds`` accepts.  Errors: InputError that says ``expected``."""
    if value is not None and not (isinstance(value, Real) and holds(float(value))):
        raise InputError(f"{name}: expected {expected}, got {value!r}")


def require_known(name: str, value: Any, known: Collection[Any]) -> None:
    """Check that a value is None or one of ``known``.  Errors: InputError."""
    if value is not None and value not in known:
        raise InputError(f"{name}: expected {' or '.join(map(str, known))}, got {value!r}")


class Refusals:
    """Collects the errors of several checks, so that a user can correct all of them before the next try.

    refusals = Refusals()
    with refusals.collected():
        require_output(out)
    with refusals.collected():
        labels = labels_from(text)
    refusals.raise_all()
    """

    def __init__(self) -> None:
        self._errors: list[GmmvitError] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        try:
            yield
        except GmmvitError as exc:
            self._errors += exc.errors or (exc,)

    def refuse(self, condition: object, message: str, *, hint: str = "") -> None:
        """Collect an InputError if the condition holds."""
        if condition:
            self._errors.append(InputError(message, hint=hint))

    def raise_all(self) -> None:
        """Raise the only error itself; several as one ServerError if all are of this class, else as one InputError."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            own = [f"{exc}\n  {exc.hint}" if exc.hint != exc.default_hint else str(exc) for exc in self._errors]
            kind = ServerError if all(isinstance(exc, ServerError) for exc in self._errors) else InputError
            error = kind(f"{len(own)} errors:\n- " + "\n- ".join(own), hint="correct all of them")
            error.errors = tuple(self._errors)
            raise error
