"""The folder in which this package keeps what it can make or fetch again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/gmmvit-deploy``; without XDG_CACHE_HOME, ``~/.cache/gmmvit-deploy``.

    Errors: RuntimeError when neither XDG_CACHE_HOME nor a home directory is known.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gmmvit-deploy"
