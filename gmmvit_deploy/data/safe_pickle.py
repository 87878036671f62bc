"""Pickles of the CIFAR archives, without executing anything: arrays, numbers, text and containers, no more."""

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
"""What a pickled array asks for; each only makes an array. Anything else could run code."""


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Errors: InputError on anything but the parts of an array."""
        if (module, name) not in _ADMITTED:
            raise InputError(f"it asks for {module}.{name}, which no array needs: refused, nothing was executed")
        return super().find_class(module, name)


def arrays_from_pickle(data: bytes, name: str) -> dict[str, Any]:
    """A pickled dictionary, keys as text.

    Errors: InputError when it asks for anything but arrays, is damaged, or is no dictionary.
    """
    try:
        loaded = _ArraysOnly(io.BytesIO(data), encoding="bytes").load()
    except InputError as exc:
        raise InputError(f"{name}: {exc}") from exc
    # A damaged pickle fails in whatever way its bytes happen to say.
    except Exception as exc:
        raise InputError(f"{name}: not a pickle of arrays: {exc}") from exc
    if not isinstance(loaded, dict):
        raise InputError(f"{name}: expected a dictionary, got {type(loaded).__name__}")
    return {key.decode() if isinstance(key, bytes) else str(key): value for key, value in loaded.items()}
