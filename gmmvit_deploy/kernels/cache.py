"""Compiled libraries, kept between processes: the most recently used few, and why one could not be compiled.

    <folder>/<name>-<key>.so      a library           <name>-<key>.failed   the compiler's reason, as text
    <folder>/<name>-<key>.lock    held exclusively while compiling or removing, shared by every process that uses it

The folder is ``$XDG_CACHE_HOME/gmmvit-deploy/kernels``, by default below ``~/.cache``. It holds at most
`MOST_LIBRARIES` libraries and as many failures; a library that a living process uses is never removed.
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
"""Library → its lock, held by this process for as long as it lives."""


class CompileError(Exception):
    """The library could not be compiled this time; the message is the reason."""


class SourceError(CompileError):
    """The compiler reported an error in the sources.  Kept in the cache under the library's key."""


def cache_folder() -> Path:
    """Errors: RuntimeError when no home directory is known and XDG_CACHE_HOME is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gmmvit-deploy" / "kernels"


def compiled(stem: str, compile_to: Callable[[Path], None]) -> Path:
    """The library ``<stem>.so`` of the cache, in use by this process from now on; compiled if it is not there.

    stem: name and key.  compile_to: writes the library to a path, or raises `CompileError`; a `SourceError`
    is recorded.
    Several processes may want it at once: one compiles, the others wait. Nothing half-written bears its name.
    Errors: CompileError, also a SourceError recorded earlier, without another attempt; OSError when the folder cannot
    be used.
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
    """The library's lock, shared with the other processes that use it; None where the library is not there."""
    lock = _locked(library.with_suffix(".lock"), fcntl.LOCK_SH)
    try:
        os.utime(library)
    except FileNotFoundError:
        lock.close()
        return None
    return lock


def recorded_failure(stem: str) -> Path | None:
    """The file that records why this library could not be compiled, or None."""
    path = cache_folder() / f"{stem}.failed"
    return path if path.exists() else None


def empty_cache() -> tuple[list[Path], list[Path]]:
    """Remove all libraries and recorded failures: (what was removed, the libraries left because a process uses them).

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
    """The most recently used first."""
    times: list[tuple[float, Path]] = []
    for path in folder.glob(f"*-*{suffix}"):
        with suppress(FileNotFoundError):
            times.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(times, reverse=True)]


def _removed(path: Path) -> bool:
    """Remove a file and its lock; False if a living process uses it."""
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
    """The lock file, open and held; opened again if it was removed while waiting for it.

    kind: ``fcntl.LOCK_SH`` or ``LOCK_EX``.  A library that is there is only ever locked shared: every process that
    uses it holds that lock for as long as it lives, so whoever asked for an exclusive one would wait as long.
    """
    while True:
        lock = path.open("a")
        fcntl.flock(lock, kind)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                return lock
        lock.close()
