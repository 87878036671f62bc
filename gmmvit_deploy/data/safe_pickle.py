"""Read the pickles of the CIFAR archives without executing code: only arrays, numbers, text and containers."""

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
"""Globals that a pickled array imports; they only create arrays. Any other global could run code."""


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Import a global that an array needs.  Errors: InputError on any other global."""
        if (module, name) not in _ADMITTED:
            raise InputError(f"it asks for {module}.{name}, which no array needs: refused, nothing was executed")
        return super().find_class(module, name)


def arrays_from_pickle(data: bytes, name: str) -> dict[str, Any]:
    """Read a pickled dictionary, with its keys as text.

    Errors: InputError when the pickle needs more than arrays, is damaged, or is not a dictionary.
    """
    try:
        loaded = _ArraysOnly(io.BytesIO(data), encoding="bytes").load()
    except InputError as exc:
        raise InputError(f"{name}: {exc}") from exc
    # A damaged pickle can raise almost any exception.
    except Exception as exc:
        raise InputError(f"{name}: not a pickle of arrays: {exc}") from exc
    if not isinstance(loaded, dict):
        raise InputError(f"{name}: expected a dictionary, got {type(loaded).__name__}")
    return {key.decode() if isinstance(key, bytes) else str(key): value for key, value in loaded.items()}
