"""Cache compiled libraries on disk, and record failed compilations.

    <folder>/<name>-<key>.so      a library           <name>-<key>.failed   the compiler's reason, as text
    <folder>/<name>-<key>.lock    locked exclusively to compile or remove the library, shared by each process using it

The folder is ``$XDG_CACHE_HOME/gmmvit-deploy/kernels``, below ``~/.cache`` by default. It keeps the `MOST_LIBRARIES`
most recently used libraries, and as many failures. A library that a running process uses is never removed.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

__all__ = [
    "MOST_LIBRARIES",
    "CompileError",
    "SourceError",
    "cache_folder",
    "compiled",
    "empty_cache",
    "recorded_failure",
]

MOST_LIBRARIES = 8
_IN_USE: dict[Path, IO[str]] = {}
"""Library → its lock file, which this process keeps locked until it ends."""


class CompileError(Exception):
    """The library could not be compiled; another attempt may succeed.  The message is the reason."""


class SourceError(CompileError):
    """The compiler reported an error in the sources.  The cache records it under the library's key."""


def cache_folder() -> Path:
    """Return the cache's folder.

    Errors: RuntimeError when no home directory is known and XDG_CACHE_HOME is not set.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gmmvit-deploy" / "kernels"


def compiled(stem: str, compile_to: Callable[[Path], None]) -> Path:
    """Return the path of the library ``<stem>.so``, compile it if it is not in the cache, and mark it as in use.

    stem: name and key.  compile_to: writes the library to a path, or raises `CompileError`; a `SourceError`
    is recorded.
    If several processes ask for the same library, the first compiles it and the others wait. The file appears under
    its name only when it is complete.
    Errors: CompileError; SourceError, without another attempt, if an earlier failure is recorded; OSError when the
    folder cannot be used; RuntimeError as `cache_folder`.
    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    library, failure = folder / f"{stem}.so", folder / f"{stem}.failed"
    if library in _IN_USE and library.exists():
        return library
    while (lock := _in_use(library)) is None:
        with _locked(library.with_suffix(".lock"), fcntl.LOCK_EX):
            if not library.exists():
                if failure.exists():
                    raise SourceError(failure.read_text(encoding="utf-8"))
                _compile(library, failure, compile_to)
    _IN_USE[library] = lock
    _remove_oldest(folder)
    return library


def _in_use(library: Path) -> IO[str] | None:
    """Take a shared lock on a library and return the lock file; None if the library does not exist."""
    lock = _locked(library.with_suffix(".lock"), fcntl.LOCK_SH)
    try:
        os.utime(library)
    except FileNotFoundError:
        lock.close()
        return None
    return lock


def recorded_failure(stem: str) -> Path | None:
    """Return the file that records why this library could not be compiled, or None."""
    path = cache_folder() / f"{stem}.failed"
    return path if path.exists() else None


def empty_cache() -> tuple[list[Path], list[Path]]:
    """Remove all libraries and recorded failures.

    Returns (removed files, libraries that remain because a running process uses them).
    Errors: RuntimeError as `cache_folder`; OSError when a file cannot be removed.
    """
    removed: list[Path] = []
    left: list[Path] = []
    folder = cache_folder()
    for path in [*_by_use(folder, ".so"), *_by_use(folder, ".failed")]:
        (removed if _removed(path) else left).append(path)
    return removed, left


def _compile(library: Path, failure: Path, compile_to: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=f"{library.stem}.") as folder:
        part = Path(folder) / library.name
        try:
            compile_to(part)
        except SourceError as exc:
            text = Path(folder) / failure.name
            text.write_text(str(exc), encoding="utf-8")
            text.replace(failure)
            _remove_oldest(library.parent)
            raise
        part.replace(library)


def _remove_oldest(folder: Path) -> None:
    for suffix in (".so", ".failed"):
        for path in _by_use(folder, suffix)[MOST_LIBRARIES:]:
            with suppress(OSError):  # another process may remove it at the same moment
                _removed(path)


def _by_use(folder: Path, suffix: str) -> list[Path]:
    """List the cache's files with this suffix, the most recently used first."""
    times: list[tuple[float, Path]] = []
    for path in folder.glob(f"*-*{suffix}"):
        with suppress(FileNotFoundError):
            times.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(times, reverse=True)]


def _removed(path: Path) -> bool:
    """Remove a file and, if no other file needs it, its lock.  Returns False if a running process uses the file."""
    lock_path = path.with_suffix(".lock")
    with lock_path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        path.unlink(missing_ok=True)
        if not any(path.with_suffix(suffix).exists() for suffix in (".so", ".failed")):
            lock_path.unlink(missing_ok=True)
    return True


def _locked(path: Path, kind: int) -> IO[str]:
    """Open and lock a lock file, and open it again if another process removed it during the wait.

    kind: ``fcntl.LOCK_SH`` or ``LOCK_EX``.  Ask for an exclusive lock only while the library does not exist: each
    process that uses a library holds a shared lock until it ends, and the exclusive lock would wait for all of them.
    """
    while True:
        lock = path.open("a")
        fcntl.flock(lock, kind)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                return lock
        lock.close()
