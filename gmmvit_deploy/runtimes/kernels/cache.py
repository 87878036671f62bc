"""Cache compiled libraries on disk, and record failed compilations.

    <folder>/<name>-<key>.so       a compiled library
    <folder>/<name>-<key>.failed   a failed compilation: the compiler's error as text
    <folder>/<name>-<key>.lock     the library's lock file.  A process that uses the library holds a shared lock; a
                                   process that compiles or removes the library holds an exclusive lock

The folder is ``$XDG_CACHE_HOME/gmmvit-deploy/kernels``; without XDG_CACHE_HOME it is
``~/.cache/gmmvit-deploy/kernels``. The cache keeps the `MOST_LIBRARIES` most recently used libraries, and as many
recorded failures. A library that a running process uses is never removed.
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
"""Library → the library's lock file, which this process keeps locked until the process ends."""


class CompileError(Exception):
    """A library could not be compiled, but another attempt may succeed.  The message gives the reason."""


class SourceError(CompileError):
    """The compiler reported an error in the sources.  The cache records the error under the library's key."""


def cache_folder() -> Path:
    """Return the cache's folder.

    Errors: RuntimeError when neither XDG_CACHE_HOME nor a home directory is known.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gmmvit-deploy" / "kernels"


def compiled(stem: str, compile_to: Callable[[Path], None]) -> Path:
    """Return the path of the library ``<stem>.so``, and mark the library as in use by this process.

    A library that is not in the cache is compiled first. If several processes need the same library, the first process
    compiles the library and the other processes wait. The file ``<stem>.so`` appears only when the file is complete.

    stem: the library's name and key, joined.  compile_to: a function that writes the library to a path, or raises
    `CompileError`.
    Errors: CompileError when the library cannot be compiled.
    SourceError when the sources have an error. The cache records the error, and later calls raise the recorded error
    without compiling.
    OSError when the folder cannot be used.
    RuntimeError as `cache_folder`.
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
    """Take a shared lock on a library and return the lock file, or None if the library does not exist."""
    lock = _locked(library.with_suffix(".lock"), fcntl.LOCK_SH)
    try:
        os.utime(library)
    except FileNotFoundError:
        lock.close()
        return None
    return lock


def recorded_failure(stem: str) -> Path | None:
    """Return the file that records why this library could not be compiled, or None if no failure is recorded."""
    path = cache_folder() / f"{stem}.failed"
    return path if path.exists() else None


def empty_cache() -> tuple[list[Path], list[Path]]:
    """Remove all libraries and recorded failures.

    Returns (removed files, libraries that remain because a running process uses them).
    Errors: RuntimeError as `cache_folder`.
    OSError when a file cannot be removed.
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
            with suppress(OSError):  # another process may remove the file at the same moment
                _removed(path)


def _by_use(folder: Path, suffix: str) -> list[Path]:
    """Return the files of the cache with this suffix, most recently used first."""
    times: list[tuple[float, Path]] = []
    for path in folder.glob(f"*-*{suffix}"):
        with suppress(FileNotFoundError):
            times.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(times, reverse=True)]


def _removed(path: Path) -> bool:
    """Remove a library or a recorded failure.  Also remove the lock file if no other file needs the lock file.

    If a running process uses the library, the function removes nothing and returns False.
    """
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
    """Open and lock a lock file.  If another process removes the file during the wait, open and lock a new file.

    kind: ``fcntl.LOCK_SH`` (shared) or ``fcntl.LOCK_EX`` (exclusive).  Request an exclusive lock only while the library
    does not exist: every process that uses the library holds a shared lock until the process ends, and the request
    would wait for all these processes.
    """
    while True:
        lock = path.open("a")
        fcntl.flock(lock, kind)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                return lock
        lock.close()
