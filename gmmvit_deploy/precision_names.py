"""Read the names of precisions that a user types."""

from __future__ import annotations

from collections.abc import Sequence

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.inference.precision import PRECISIONS, Precision


def precision_from(text: str) -> Precision:
    """Parse the name of a precision.  Errors: InputError when the name is unknown."""
    if text not in PRECISIONS:
        raise InputError(f"precision {text!r} is not known", hint=f"type one of {', '.join(PRECISIONS)}")
    return text


def precisions_from(names: str | Sequence[str]) -> tuple[Precision, ...]:
    """Return different precisions by their names, such as ``["fp16", "int8"]`` or the text ``fp16,int8``.

    Errors: InputError when a name is unknown, or when there is no name.
    """
    texts = names.split(",") if isinstance(names, str) else names
    parts = [part.strip() for part in texts if part.strip()]
    if not parts:
        raise InputError(
            "expected at least one precision, got an empty list", hint=f"type one or more of {', '.join(PRECISIONS)}"
        )
    return tuple(dict.fromkeys(precision_from(part) for part in parts))
