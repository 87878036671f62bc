"""The folder in which this package keeps what it can make or fetch again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return ``gmmvit-deploy`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``.  Errors: RuntimeError without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gmmvit-deploy"
