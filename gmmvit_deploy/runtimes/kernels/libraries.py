"""Find the library of this project's kernels for OpenVINO: in the wheel, else in a cache, else compiled on first use.

A compiled OpenVINO operation works with a single version of OpenVINO. A wheel for a platform (`.ci/release`) has a
library for one version, beside this file. For other versions, and for the wheel without a library, the first use
compiles: this needs a C++ compiler and takes some seconds. OpenVINO's package contains the headers. The library
contains the kernels for all instruction sets of the processor's architecture, and chooses the best when the program
runs (`instruction_sets.c`).

    <folder>/openvino-<key>.so       a compiled library
    <folder>/openvino-<key>.failed   a compilation that failed because of the sources: the compiler's error as text
    <folder>/compiling               the lock file of a process that compiles; it is never removed

The folder is ``$XDG_CACHE_HOME/gmmvit-deploy/kernels``; without XDG_CACHE_HOME it is
``~/.cache/gmmvit-deploy/kernels``. The key is a hash of the compiler's arguments and the output of ``$CXX --version``,
the flags, the sources, and the version of OpenVINO. The cache keeps the `MAX_LIBRARIES` most recently used libraries,
and as many recorded failures. No process compiles the sources of a recorded failure again; a failure from lack of
memory or disk space is not recorded.
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

from gmmvit_deploy.extras import require
from gmmvit_deploy.files.caches import cache_folder

_HERE = Path(__file__).parent
_LANGUAGES = {".cpp": "c++", ".c": "c", ".h": ""}
"""Suffix of a source → the compiler's name of the language; headers are only included."""
_MACHINES = ("x86_64", "aarch64")
"""Architectures for which the kernels are written."""
_FLAGS = ("-O2", "-shared", "-fPIC", "-DOV_THREAD=OV_THREAD_TBB")
_SOURCE_ERROR = re.compile(r":\d+: (fatal )?error: ")
"""Format in which g++ and clang++ report an error in a source: the line number before the message."""
_SHORTAGE = re.compile(r"no space left|disk quota|out of memory|memory exhausted|cannot allocate|killed", re.IGNORECASE)
"""Messages of compilers when the machine lacks memory or disk space.  Some of these messages have a line number."""
TRY_AGAIN = "gmmvit doctor --empty-kernel-cache"
"""Command that deletes compiled kernels and recorded failures, and compiles the kernels again."""
_SUFFIXES = (".so", ".failed")
MAX_LIBRARIES = 8


class CompileError(Exception):
    """A library could not be compiled, but another attempt may succeed."""


class SourceError(CompileError):
    """The compiler reported an error in the sources.  The cache records the error."""


@lru_cache
def openvino_library() -> tuple[Path | None, str]:
    """Return (path of the library of our kernels, "") or (None, why it is not available); compile it if need be.

    The compiler is ``$CXX``, by default ``c++``.
    Errors: MissingDependencyError when OpenVINO is not installed.
    """
    openvino = require("openvino", package="openvino", extra="openvino")
    version = str(openvino.__version__)
    if (shipped := _HERE / _name_in_wheel(version)).exists():
        return shipped, ""
    if platform.machine() not in _MACHINES:
        return None, f"our kernels are written for x86-64 and 64-bit ARM, this processor is {platform.machine()}"
    try:
        compiler = shlex.split(os.environ.get("CXX") or "c++") or ["c++"]
        stem, arguments = _stem(version, compiler), _arguments(Path(openvino.__file__).parent)
        return compiled(stem, lambda path: _compile(compiler, [*arguments, "-o", str(path)])), ""
    # `Path.home()` raises RuntimeError when HOME is unset. shlex raises ValueError on an unbalanced quote in $CXX.
    except (OSError, RuntimeError, ValueError, CompileError) as exc:
        return None, _reason(exc, version)


def compile_for_wheel(openvino: Path, version: str, compiler: list[str], folder: Path) -> Path:
    """Compile the library that a wheel has beside this file, into ``folder``, and return its path.

    openvino: the folder of OpenVINO's package for the wheel's platform.  version: its ``openvino.__version__``.
    compiler: the command of a compiler for that platform.
    Errors: CompileError; FileNotFoundError when the compiler is not installed.
    """
    library = folder / _name_in_wheel(version)
    no_path = f"-ffile-prefix-map={_HERE}=."  # the library names its sources
    _compile(compiler, [no_path, *_arguments(openvino), "-o", str(library)])
    return library


def empty_kernel_cache() -> list[Path]:
    """Remove compiled libraries and recorded failures, so that the next use compiles again; return the removed files.

    Errors: RuntimeError when neither XDG_CACHE_HOME nor a home directory is known.
    OSError when a file cannot be removed.
    """
    removed = [path for suffix in _SUFFIXES for path in _by_use(_folder(), suffix)]
    for path in removed:
        path.unlink(missing_ok=True)
    openvino_library.cache_clear()
    return removed


# ---- compile -------------------------------------------------------------------------------------------------------


def _sources() -> list[Path]:
    return sorted(path for path in _HERE.iterdir() if path.suffix in _LANGUAGES)


def _stem(version: str, compiler: list[str]) -> str:
    """Return the name and key of the library, joined by a hyphen.  Errors: OSError when the compiler does not start."""
    answer = subprocess.run([*compiler, "--version"], capture_output=True, text=True, errors="replace", check=False)
    return f"openvino-{_key(version, [*compiler, answer.stdout, answer.stderr])}"


def _name_in_wheel(version: str) -> str:
    """Return the file name of a library of these sources for this version of OpenVINO, whatever compiled it."""
    return f"openvino-{_release(version)}-{_key(version, [])}.so"


def _release(version: str) -> str:
    """2026.4.1-22982-e213a147257-releases/2026/4 → 2026.4.1."""
    return version.partition("-")[0]


def _key(version: str, compiler: list[str]) -> str:
    sources = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in _sources()}
    return hashlib.sha256(json.dumps([compiler, _FLAGS, sources, version]).encode()).hexdigest()[:16]


def _arguments(root: Path) -> list[str]:
    """Return the compiler's arguments but for the output.

    root: the folder of OpenVINO's package.  Errors: CompileError when it has no headers.
    """
    libraries = [sorted((root / "libs").glob(pattern))[:1] for pattern in ("libopenvino.so.*", "libtbb.so.*")]
    if not ((root / "include" / "openvino" / "core" / "parallel.hpp").exists() and all(libraries)):
        raise CompileError(f"{root}: OpenVINO is installed without its headers, which pip's package has")
    parts = [word for path in _sources() if (kind := _LANGUAGES[path.suffix]) for word in ("-x", kind, str(path))]
    return [*_FLAGS, "-isystem", str(root / "include"), *parts, "-x", "none", *(str(one[0]) for one in libraries)]


def _compile(compiler: list[str], arguments: list[str]) -> None:
    """Run the compiler.  Errors: SourceError and CompileError."""
    answer = subprocess.run([*compiler, *arguments], capture_output=True, text=True, errors="replace", check=False)
    if answer.returncode:
        lines = [line for line in answer.stderr.splitlines() if "error" in line] or ["the compiler printed no error"]
        why = f"the compiler {compiler[0]} failed: {lines[0].strip()}"
        of_sources = _SOURCE_ERROR.search(answer.stderr) and not _SHORTAGE.search(answer.stderr)
        raise SourceError(why) if of_sources else CompileError(why)


def _reason(exc: Exception, version: str) -> str:
    if isinstance(exc, FileNotFoundError) and exc.filename and os.sep not in str(exc.filename):
        why = f"no C++ compiler: {exc.filename} is not installed; install g++, or set CXX to another compiler"
        for shipped in _HERE.glob("openvino-*.so"):
            compiled_for = shipped.name.split("-")[1]
            why += f", or OpenVINO {compiled_for}: the wheel's library is not for {_release(version)}"
        return why
    return str(exc)


# ---- cache ---------------------------------------------------------------------------------------------------------


def _folder() -> Path:
    return cache_folder() / "kernels"


def compiled(stem: str, compile_to: Callable[[Path], None]) -> Path:
    """Return the path of the library ``<stem>.so``, compiled by the first of several processes; the others wait.

    stem: the library's name and key, joined.  compile_to: writes the library to a path, or raises `CompileError`.
    Errors: CompileError when the library cannot be compiled; SourceError when its sources have an error, also one that
    is recorded.  OSError when the folder cannot be used.
    RuntimeError when neither XDG_CACHE_HOME nor a home directory is known.
    """
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    library, failure = folder / f"{stem}.so", folder / f"{stem}.failed"
    if not library.exists():
        with (folder / "compiling").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if failure.exists():
                raise SourceError(failure.read_text(encoding="utf-8"))
            if not library.exists():
                _remove_oldest(folder)
                _compile_to_cache(library, failure, compile_to)
    os.utime(library)
    return library


def _compile_to_cache(library: Path, failure: Path, compile_to: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=f"{library.stem}.") as folder:
        part = Path(folder) / library.name
        try:
            compile_to(part)
        except SourceError as exc:
            why = f"{exc} (recorded in {failure}); type {TRY_AGAIN} to compile again"
            part.write_text(why, encoding="utf-8")
            part.replace(failure)
            raise SourceError(why) from exc
        part.replace(library)


def _remove_oldest(folder: Path) -> None:
    for suffix in _SUFFIXES:
        for path in _by_use(folder, suffix)[MAX_LIBRARIES - 1 :]:
            path.unlink(missing_ok=True)


def _by_use(folder: Path, suffix: str) -> list[Path]:
    """Return the files of the cache with this suffix, most recently used first."""
    times: list[tuple[float, Path]] = []
    for path in folder.glob(f"*-*{suffix}"):
        with suppress(FileNotFoundError):  # another process may remove the file at the same moment
            times.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(times, reverse=True)]
