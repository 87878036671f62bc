"""Import an optional package on demand; the error for a missing package names the command that installs it."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from gmmvit_deploy.errors import MissingDependencyError


def require(module: str, *, package: str, extra: str) -> Any:
    """Import ``module`` of the distribution ``package``.

    extra: the optional dependency group that contains ``package``: ``pip install 'gmmvit-deploy[EXTRA]'`` installs it.
    Errors: MissingDependencyError when ``package`` is not installed.
    """
    try:
        imported: ModuleType = importlib.import_module(module)
    except ModuleNotFoundError as exc:
        raise MissingDependencyError(package, extra=extra) from exc
    return imported
