"""Read the pickles of the CIFAR archives without running code from the files.

A pickle may contain only arrays, numbers, text and containers. A pickle with any other content is refused.
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
"""(module, name) of the functions and classes that a pickle of arrays imports.

These functions and classes only create arrays; other functions could run any code.
"""


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Import a function or class of `_ADMITTED`.  Errors: InputError when the name is not in `_ADMITTED`."""
        if (module, name) not in _ADMITTED:
            raise InputError(
                f"the file was not loaded, because the pickle in the file calls {module}.{name}, which creates no "
                "array; no code of the file was run"
            )
        return super().find_class(module, name)


def arrays_from_pickle(data: bytes, name: str) -> dict[str, Any]:
    """Return the pickled dictionary in ``data``, with the keys converted to text.

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
