"""Temporary folders of this package, and the removal of those whose processes were killed.

Each folder is locked by its process (`locked_paths`). Whoever makes the next folder removes the folders without a
lock, with the shared memory of their servers. Folders of other users and of living processes remain.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gmmvit_deploy.files.locked_paths import locked_folder, remove_unlocked

__all__ = ["new_run_folder", "remove_leftovers", "remove_run_folder", "temporary_folder"]

_PREFIX = "gmmvit-run-"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Triton keeps its shared memory


def remove_leftovers() -> list[Path]:
    """Remove the temporary folders and the shared memory of killed processes, and return the removed folders."""
    return remove_unlocked(Path(tempfile.gettempdir()), _PREFIX, before=_remove_shared_memory)


def new_run_folder(purpose: str) -> tuple[Path, int]:
    """Remove leftovers, make a temporary folder, and return the folder and the descriptor that holds its lock.

    purpose: a word for the folder's name.
    """
    remove_leftovers()
    return locked_folder(f"{_PREFIX}{purpose}-")


def remove_run_folder(folder: Path, lock: int) -> None:
    """Remove a folder of `new_run_folder`, with the shared memory whose names begin with the folder's name."""
    _remove_shared_memory(folder)
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """Yield a temporary folder, which is removed afterwards, or by a later run if this process is killed.

    purpose: a word for the folder's name.
    """
    folder, lock = new_run_folder(purpose)
    try:
        yield folder
    finally:
        remove_run_folder(folder, lock)


def _remove_shared_memory(folder: Path) -> None:
    for region in _SHARED_MEMORY.glob(f"{folder.name}*"):
        region.unlink(missing_ok=True)
