"""Optional packages, imported where they are needed, with an error that says how to get them."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from gmmvit_deploy.errors import MissingDependencyError

__all__ = ["require"]


def require(module: str, *, package: str, extra: str) -> Any:
    """Import ``module``, which the distribution ``package`` brings and our ``extra`` installs.

    Errors: MissingDependencyError when it is not installed.
    """
    try:
        imported: ModuleType = importlib.import_module(module)
    except ModuleNotFoundError as exc:
        raise MissingDependencyError(package, extra=extra) from exc
    return imported
