"""Import optional packages on demand, with an error that names the command to install them."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from gmmvit_deploy.errors import MissingDependencyError

__all__ = ["require"]


def require(module: str, *, package: str, extra: str) -> Any:
    """Import ``module`` of the distribution ``package``, which the extra ``extra`` of this package installs.

    Errors: MissingDependencyError when it is not installed.
    """
    try:
        imported: ModuleType = importlib.import_module(module)
    except ModuleNotFoundError as exc:
        raise MissingDependencyError(package, extra=extra) from exc
    return imported
