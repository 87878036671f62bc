"""Read the pickles of the CIFAR archives without executing code from the files.

Only arrays, numbers, text and containers are read; every other content is refused.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from gmmvit_deploy.errors import InputError

__all__ = ["arrays_from_pickle"]

_ADMITTED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}
"""Globals that a pickled array imports: functions and classes that only create arrays. Other globals could run code."""


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Import a global of `_ADMITTED`.  Errors: InputError for any other global."""
        if (module, name) not in _ADMITTED:
            raise InputError(
                f"the file was not loaded, because the pickle in the file calls {module}.{name}, which creates no "
                "array; no code of the file was run"
            )
        return super().find_class(module, name)


def arrays_from_pickle(data: bytes, name: str) -> dict[str, Any]:
    """Read a pickled dictionary; return it with its keys as text.

    name: the name of the file, for messages.
    Errors: InputError when the pickle contains more than arrays, is damaged, or is not a dictionary.
    """
    try:
        loaded = _ArraysOnly(io.BytesIO(data), encoding="bytes").load()
    except InputError as exc:
        raise InputError(f"{name}: {exc}") from exc
    # A damaged pickle can raise almost any exception.
    except Exception as exc:
        raise InputError(f"{name}: expected a pickle of arrays: {exc}") from exc
    if not isinstance(loaded, dict):
        raise InputError(f"{name}: expected a dictionary, got {type(loaded).__name__}")
    return {key.decode() if isinstance(key, bytes) else str(key): value for key, value in loaded.items()}
