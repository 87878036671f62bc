"""Temporary folders and files that are locked while their process lives, and the removal of those of killed processes.

The owner holds `flock` on the folder or file itself, which Linux releases when the last process that has the descriptor
ends, for any reason. Whoever makes the next temporary folder removes those without a lock, with the shared memory of
their servers. Folders of other users and of living processes remain.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

_PREFIX = "gmmvit-run-"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Triton keeps its shared memory


def remove_leftovers() -> list[Path]:
    """Remove the temporary folders and the shared memory of killed processes, and return the removed folders."""
    return remove_unlocked(Path(tempfile.gettempdir()), _PREFIX, before=_remove_shared_memory)


def new_run_folder(purpose: str) -> tuple[Path, int]:
    """Remove leftovers, make a temporary folder, and return it and the descriptor of its lock."""
    remove_leftovers()
    return locked_folder(f"{_PREFIX}{purpose}-")


def remove_run_folder(folder: Path, lock: int) -> None:
    """Remove a folder of `new_run_folder`, with the shared memory whose names begin with the folder's name."""
    _remove_shared_memory(folder)
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


@contextlib.contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """Yield a temporary folder, which is removed afterwards, or by a later run if this process is killed."""
    folder, lock = new_run_folder(purpose)
    try:
        yield folder
    finally:
        remove_run_folder(folder, lock)


def _remove_shared_memory(folder: Path) -> None:
    for region in _SHARED_MEMORY.glob(f"{folder.name}*"):
        region.unlink(missing_ok=True)


def locked_folder(prefix: str, parent: Path | None = None) -> tuple[Path, int]:
    """Make a folder as `tempfile.mkdtemp` does, and return it and the descriptor of its lock.  Errors: OSError."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with contextlib.suppress(FileNotFoundError):  # another process removed the folder before the lock was held
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            if _holds(descriptor, folder):
                return folder, descriptor


def locked_file(prefix: str, parent: Path) -> tuple[Path, int]:
    """Make a file as `tempfile.mkstemp` does, and return it and its descriptor, open for writing.  Errors: OSError."""
    while True:
        descriptor, name = tempfile.mkstemp(prefix=prefix, dir=parent)
        if _holds(descriptor, Path(name)):
            return Path(name), descriptor


def _holds(descriptor: int, path: Path) -> bool:
    """Lock a descriptor. Return False, with the descriptor closed, if another process has removed the path."""
    with contextlib.suppress(OSError):  # a file system without locks: `unlocked_paths` never yields its paths
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    if _is_at(descriptor, path):
        return True
    os.close(descriptor)
    return False


def _is_at(descriptor: int, path: Path) -> bool:
    opened = os.fstat(descriptor)
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    return (opened.st_dev, opened.st_ino) == (there.st_dev, there.st_ino)


def unlocked_paths(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield each file and folder of this user whose name begins with ``prefix`` and whose owner has ended.

    The path is locked until the next is requested, so that no two processes remove the same path.
    """
    try:
        paths = sorted(path for path in parent.iterdir() if path.name.startswith(prefix))
    except OSError:
        return
    for path in paths:
        try:
            entry = path.lstat()
            if entry.st_uid != os.geteuid() or not (stat.S_ISDIR(entry.st_mode) or stat.S_ISREG(entry.st_mode)):
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:  # removed in the meantime, or not readable
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                yield path
        except OSError:  # a living process holds the lock, or this file system has no locks
            continue
        finally:
            os.close(descriptor)


def remove_unlocked(parent: Path, prefix: str, *, before: Callable[[Path], None] = lambda path: None) -> list[Path]:
    """Remove the paths of `unlocked_paths`, after calling ``before`` with each, and return the removed paths."""
    removed = []
    for path in unlocked_paths(parent, prefix):
        before(path)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        if not path.exists():
            removed.append(path)
    return removed
