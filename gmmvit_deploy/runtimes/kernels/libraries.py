"""Compile this project's kernels for OpenVINO on first use, and cache the library.

A compiled OpenVINO operation works with a single version of OpenVINO, so no library is shipped. Compiling needs a C++
compiler and takes some seconds. OpenVINO's package contains the headers. The library contains the kernels for all
instruction sets of the processor's architecture, and chooses the best when the program runs (`instruction_sets.c`).

    <folder>/openvino-<key>.so       a compiled library
    <folder>/openvino-<key>.failed   a compilation that failed because of the sources: the compiler's error as text
    <folder>/openvino-<key>.lock     the library's lock file.  A process that uses the library holds a shared lock; a
                                     process that removes the library holds an exclusive lock
    <folder>/compiling               a lock file that is never removed.  A process that compiles any library holds an
                                     exclusive lock

The folder is ``$XDG_CACHE_HOME/gmmvit-deploy/kernels``; without XDG_CACHE_HOME it is
``~/.cache/gmmvit-deploy/kernels``. The key is a hash of the compiler's arguments and the output of ``$CXX --version``,
the flags, the sources, and the version of OpenVINO. The cache keeps the `MOST_LIBRARIES` most recently used libraries,
and as many recorded failures. A library that a running process uses is never removed. No process compiles the sources
of a recorded failure again; a failure from lack of memory or disk space is not recorded.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, NamedTuple

from gmmvit_deploy.extras import require
from gmmvit_deploy.files.caches import cache_folder

_HERE = Path(__file__).parent
KERNEL_SOURCES = (
    "masked_attention.c",
    "masked_attention.h",
    "residual_norm.c",
    "residual_norm.h",
    "product_chain.c",
    "product_chain.h",
    "instruction_sets.c",
    "instruction_sets.h",
    "attention_on_vectors.h",
    "attention_products.h",
    "norm_on_vectors.h",
    "chain_on_vectors.h",
    "vector_words.h",
    *(f"kernels_{name}.c" for name in ("avx512", "avx2", "neon")),
)
"""Sources of the kernels themselves."""
_SOURCES = ("openvino_operations.cpp", *KERNEL_SOURCES)
_LANGUAGES = {".cpp": "c++", ".c": "c"}  # suffix → the compiler's name of the language; headers are only included
_MACHINES = ("x86_64", "aarch64")
"""Architectures for which the kernels are written."""
_FLAGS = ("-O2", "-shared", "-fPIC", "-DOV_THREAD=OV_THREAD_TBB")
_SOURCE_ERROR = re.compile(r":\d+: (fatal )?error: ")
"""Format in which g++ and clang++ report an error in a source: the line number before the message."""
_SHORTAGE = re.compile(r"no space left|disk quota|out of memory|memory exhausted|cannot allocate|killed", re.IGNORECASE)
"""Messages of compilers when the machine lacks memory or disk space.  Some of these messages have a line number."""
_TRY_AGAIN = "gmmvit doctor --empty-kernel-cache"
MOST_LIBRARIES = 8
_IN_USE: dict[Path, IO[str]] = {}
"""Library → the library's lock file, which this process keeps locked until the process ends."""


class CompileError(Exception):
    """A library could not be compiled, but another attempt may succeed."""


class SourceError(CompileError):
    """The compiler reported an error in the sources.  The cache records the error under the library's key."""


class _OpenVino(NamedTuple):
    """The installed OpenVINO.

    include: the folder of headers.  linked: the libraries that our library is linked with.
    why_not: why our library cannot be compiled against it; empty if it can.
    """

    version: str
    include: Path
    linked: tuple[Path, ...]
    why_not: str


@lru_cache
def openvino_library() -> tuple[Path | None, str]:
    """Return (path of the library of our kernels, "") or (None, why it is not available); compile it if need be.

    The compiler is ``$CXX``, by default ``c++``.
    Errors: MissingDependencyError when OpenVINO is not installed.
    """
    openvino = _openvino()
    if openvino.why_not:
        return None, openvino.why_not
    if platform.machine() not in _MACHINES:
        return None, f"our kernels are written for x86-64 and 64-bit ARM, this processor is {platform.machine()}"
    try:
        compiler = _compiler()
        return compiled(_stem(openvino, compiler), lambda path: _compile(openvino, compiler, path)), ""
    # `Path.home()` raises RuntimeError when HOME is unset. shlex raises ValueError on an unbalanced quote in $CXX.
    except (OSError, RuntimeError, ValueError, CompileError) as exc:
        return None, _reason(exc)


def why_recorded() -> str:
    """Return the path of the record of a failed compilation, with which none is tried again, or "" without a record."""
    openvino = _openvino()
    try:
        path = _folder() / f"{_stem(openvino, _compiler())}.failed"
    except (OSError, RuntimeError, ValueError):  # without a compiler or a home directory, no failure can be recorded
        return ""
    return str(path) if path.exists() else ""


def empty_kernel_cache() -> tuple[list[Path], list[Path]]:
    """Remove compiled libraries and recorded failures, so that the next use compiles again.

    Returns (removed files, libraries that remain because a running process uses them).
    Errors: RuntimeError when neither XDG_CACHE_HOME nor a home directory is known.
    OSError when a file cannot be removed.
    """
    removed: list[Path] = []
    left: list[Path] = []
    folder = _folder()
    for path in [*_by_use(folder, ".so"), *_by_use(folder, ".failed")]:
        (removed if _removed(path) else left).append(path)
    openvino_library.cache_clear()
    return removed, left


# ---- compile -------------------------------------------------------------------------------------------------------


def _openvino() -> _OpenVino:
    openvino = require("openvino", package="openvino", extra="openvino")
    root = Path(openvino.__file__).parent
    libraries = [sorted((root / "libs").glob(pattern))[:1] for pattern in ("libopenvino.so.*", "libtbb.so.*")]
    headers = (root / "include" / "openvino" / "core" / "parallel.hpp").exists()
    missing = f"OpenVINO {openvino.__version__} is installed without its headers, which pip's package has"
    return _OpenVino(
        version=openvino.__version__,
        include=root / "include",
        linked=tuple(path for found in libraries for path in found),
        why_not="" if headers and all(libraries) else missing,
    )


def _compiler() -> list[str]:
    """Return $CXX split into program and arguments, or ``c++``."""
    return shlex.split(os.environ.get("CXX") or "c++") or ["c++"]


def _stem(openvino: _OpenVino, compiler: list[str]) -> str:
    """Return the name and key of the library, joined by a hyphen.  Errors: OSError when the compiler does not start."""
    answer = subprocess.run([*compiler, "--version"], capture_output=True, text=True, errors="replace", check=False)
    sources = {name: hashlib.sha256((_HERE / name).read_bytes()).hexdigest() for name in _SOURCES}
    key = [[*compiler, answer.stdout, answer.stderr], _FLAGS, sources, openvino.version]
    return f"openvino-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}"


def _compile(openvino: _OpenVino, compiler: list[str], path: Path) -> None:
    """Compile the library and write it to ``path``.

    Errors: SourceError when the compiler reports an error in the sources.
    CompileError on any other failure.
    """
    languages = {name: _LANGUAGES.get(Path(name).suffix) for name in _SOURCES}
    parts = [word for name, kind in languages.items() if kind for word in ("-x", kind, str(_HERE / name))]
    command = [*compiler, *_FLAGS, "-isystem", str(openvino.include), *parts, "-x", "none", *map(str, openvino.linked)]
    answer = subprocess.run([*command, "-o", str(path)], capture_output=True, text=True, errors="replace", check=False)
    if answer.returncode:
        lines = [line for line in answer.stderr.splitlines() if "error" in line] or ["the compiler printed no error"]
        why = f"the compiler {compiler[0]} failed: {lines[0].strip()}"
        if _SOURCE_ERROR.search(answer.stderr) and not _SHORTAGE.search(answer.stderr):
            raise SourceError(f"{why}; type {_TRY_AGAIN} to compile again")
        raise CompileError(why)


def _reason(exc: Exception) -> str:
    if isinstance(exc, FileNotFoundError) and exc.filename and os.sep not in str(exc.filename):
        return f"no C++ compiler: {exc.filename} is not installed; install g++, or set CXX to another compiler"
    return str(exc)


# ---- cache ---------------------------------------------------------------------------------------------------------


def _folder() -> Path:
    return cache_folder() / "kernels"


def compiled(stem: str, compile_to: Callable[[Path], None]) -> Path:
    """Return the path of the library ``<stem>.so``, and mark it as in use by this process.

    A library that is not in the cache is compiled first, by the first of several processes; the others wait.

    stem: the library's name and key, joined.  compile_to: writes the library to a path, or raises `CompileError`.
    Errors: CompileError when the library cannot be compiled; SourceError when its sources have an error, also one that
    is recorded.  OSError when the folder cannot be used.
    RuntimeError when neither XDG_CACHE_HOME nor a home directory is known.
    """
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    library, failure = folder / f"{stem}.so", folder / f"{stem}.failed"
    if library in _IN_USE and library.exists():
        return library
    while (lock := _in_use(library)) is None:
        # Not the library's own lock: after the first process has compiled, it shares that lock until it ends, and an
        # exclusive request would wait as long.
        with _locked(folder / "compiling", fcntl.LOCK_EX):
            if not library.exists():
                if failure.exists():
                    raise SourceError(failure.read_text(encoding="utf-8"))
                _compile_to_cache(library, failure, compile_to)
    _IN_USE[library] = lock
    _remove_oldest(folder)
    return library


def _in_use(library: Path) -> IO[str] | None:
    """Return the lock file of a library with a shared lock, or None if the library does not exist."""
    lock = _locked(library.with_suffix(".lock"), fcntl.LOCK_SH)
    try:
        os.utime(library)
    except FileNotFoundError:
        lock.close()
        return None
    return lock


def _compile_to_cache(library: Path, failure: Path, compile_to: Callable[[Path], None]) -> None:
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
    """Remove a library or a record, and its lock file; return False for a library that a running process uses."""
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
    """Open and lock a lock file, a new one if another process removes it during the wait.

    kind: ``fcntl.LOCK_SH`` (shared) or ``fcntl.LOCK_EX`` (exclusive).
    """
    while True:
        lock = path.open("a")
        fcntl.flock(lock, kind)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                return lock
        lock.close()
