"""Check arguments of the public functions.  Every message begins with the argument's name: ``gate: expected …``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from numbers import Integral, Real
from typing import Any

from gmmvit_deploy.errors import InputError


def require_counts(**values: Any) -> None:
    """Check that each value is None or a whole number of at least 1.  Errors: InputError."""
    for name, value in values.items():
        if value is not None and not (isinstance(value, Integral) and int(value) >= 1):
            raise InputError(f"{name}: expected a whole number of at least 1, got {value!r}")


def require_number(name: str, value: Any, expected: str, holds: Callable[[float], bool]) -> None:
    """Check that a value is None or a number that ``holds`` accepts.  Errors: InputError that says ``expected``."""
    if value is not None and not (isinstance(value, Real) and holds(float(value))):
        raise InputError(f"{name}: expected {expected}, got {value!r}")


def require_known(name: str, value: Any, known: Collection[Any]) -> None:
    """Check that a value is None or one of ``known``.  Errors: InputError."""
    if value is not None and value not in known:
        raise InputError(f"{name}: expected {' or '.join(map(str, known))}, got {value!r}")
