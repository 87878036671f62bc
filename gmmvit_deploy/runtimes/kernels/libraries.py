"""Compile this project's kernels for OpenVINO on first use, and cache the library.

A compiled OpenVINO operation works with a single version of OpenVINO, so no library is shipped. Compiling needs a C++
compiler and takes some seconds. OpenVINO's package contains the headers.

The library contains the kernels for all instruction sets of the processor's architecture, and chooses the best when the
program runs (`instruction_sets.c`).

The key of a library in the cache is a hash of:

- the compiler: its arguments and the output of ``$CXX --version``,
- the flags,
- the sources,
- the version of OpenVINO.

If the compiler reports an error in the sources, the cache records the failure under the key of the library
(`cache.py`), and no process compiles these sources again. A failure from lack of memory or disk space is not recorded.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from gmmvit_deploy.extras import require
from gmmvit_deploy.runtimes.kernels.cache import CompileError, SourceError, compiled, empty_cache, recorded_failure

__all__ = ["KERNEL_SOURCES", "empty_kernel_cache", "openvino_library", "why_recorded"]

_HERE = Path(__file__).parent
KERNEL_SOURCES = (
    "masked_attention.c",
    "masked_attention.h",
    "residual_norm.c",
    "residual_norm.h",
    "instruction_sets.c",
    "instruction_sets.h",
    "attention_on_vectors.h",
    "attention_products.h",
    "norm_on_vectors.h",
    "vector_words.h",
    *(f"kernels_{name}.c" for name in ("avx512", "avx2", "neon")),
    *(f"vectors_{name}.h" for name in ("avx512", "avx2", "neon")),
)
"""Sources of the kernels themselves."""
_FOR_OPENVINO = ("openvino_operations.cpp", *KERNEL_SOURCES)
_MACHINES = ("x86_64", "aarch64")
"""Architectures for which the kernels are written."""
_FLAGS = ("-O2", "-shared", "-fPIC")
_SOURCE_ERROR = re.compile(r":\d+: (fatal )?error: ")
"""Format in which g++ and clang++ report an error in a source: the line number before the message."""
_SHORTAGE = re.compile(r"no space left|disk quota|out of memory|memory exhausted|cannot allocate|killed", re.IGNORECASE)
"""Messages of compilers when the machine lacks memory or disk space.  Some of these messages have a line number."""
_TRY_AGAIN = "gmmvit doctor --empty-kernel-cache"
_LIBRARIES = ("libopenvino.so.*", "libtbb.so.*")


@dataclass(frozen=True, slots=True)
class _Recipe:
    """A library to compile.

    sources: the names of source files in this folder.  flags: compiler flags without paths.
    include: folders of headers.  linked: libraries to link with the kernels.
    against: the name and version of the package that contains ``include`` and ``linked``.
    """

    name: str
    sources: tuple[str, ...]
    flags: tuple[str, ...] = ()
    include: tuple[Path, ...] = ()
    linked: tuple[Path, ...] = ()
    against: str = ""


@lru_cache
def openvino_library() -> tuple[Path | None, str]:
    """Return the library of this project's kernels for OpenVINO; compile a library that the cache does not contain.

    Returns (path of the library, "") or (None, the reason why the library is not available).
    The compiler is ``$CXX``, by default ``c++``. `cache.py` describes the cache.
    Errors: MissingDependencyError when OpenVINO is not installed.
    """
    recipe, why = _openvino_recipe()
    return (None, why) if recipe is None else _library(recipe)


def why_recorded() -> str:
    """Return the path of the file that records a failed compilation, or "" if no failure is recorded.

    While the file exists, the library is not compiled again.
    Errors: as `openvino_library`.
    """
    recipe = _openvino_recipe()[0]
    try:
        path = None if recipe is None else recorded_failure(_stem(recipe, _compiler()))
    except (OSError, RuntimeError, ValueError):  # without a compiler or a home directory, no failure can be recorded
        return ""
    return str(path or "")


def empty_kernel_cache() -> tuple[list[Path], list[Path]]:
    """Remove compiled libraries and recorded failures, so that the next use compiles again.

    Returns (removed files, libraries that remain because a running process uses them).
    Errors: RuntimeError when neither XDG_CACHE_HOME nor a home directory is known.
    OSError when a file cannot be removed.
    """
    emptied = empty_cache()
    openvino_library.cache_clear()
    return emptied


def _openvino_recipe() -> tuple[_Recipe | None, str]:
    openvino = require("openvino", package="openvino", extra="openvino")
    root = Path(openvino.__file__).parent
    libraries = [sorted((root / "libs").glob(pattern)) for pattern in _LIBRARIES]
    if not (root / "include" / "openvino" / "core" / "parallel.hpp").exists() or not all(libraries):
        return None, f"OpenVINO {openvino.__version__} is installed without its headers, which pip's package has"
    return _Recipe(
        "openvino",
        _FOR_OPENVINO,
        flags=("-DOV_THREAD=OV_THREAD_TBB",),
        include=(root / "include",),
        linked=tuple(paths[0] for paths in libraries),
        against=f"openvino {openvino.__version__}",
    ), ""


def _library(recipe: _Recipe) -> tuple[Path | None, str]:
    if platform.machine() not in _MACHINES:
        return None, f"our kernels are written for x86-64 and 64-bit ARM, this processor is {platform.machine()}"
    try:
        compiler = _compiler()
        return compiled(_stem(recipe, compiler), lambda path: _compile(recipe, compiler, path)), ""
    # `Path.home()` raises RuntimeError when HOME is unset. shlex raises ValueError on an unbalanced quote in $CXX.
    except (OSError, RuntimeError, ValueError, CompileError) as exc:
        return None, _reason(exc)


def _compiler() -> list[str]:
    """Return $CXX split into program and arguments, or ``c++``."""
    return shlex.split(os.environ.get("CXX") or "c++") or ["c++"]


def _stem(recipe: _Recipe, compiler: list[str]) -> str:
    """Return the name and key of a library, joined by a hyphen.  Errors: OSError when the compiler does not start."""
    answer = subprocess.run([*compiler, "--version"], capture_output=True, text=True, errors="replace", check=False)
    sources = {name: hashlib.sha256((_HERE / name).read_bytes()).hexdigest() for name in recipe.sources}
    key = {
        "compiler": [*compiler, answer.stdout, answer.stderr],
        "flags": [*_FLAGS, *recipe.flags],
        "sources": sources,
        "against": recipe.against,
    }
    return f"{recipe.name}-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}"


def _compile(recipe: _Recipe, compiler: list[str], path: Path) -> None:
    """Compile a library and write it to ``path``.

    Errors: SourceError when the compiler reports an error in the sources.
    CompileError on any other failure.
    """
    include = [word for folder in recipe.include for word in ("-isystem", str(folder))]
    parts = [word for name in recipe.sources if (kind := _language(name)) for word in (*kind, str(_HERE / name))]
    command = [*compiler, *_FLAGS, *include, *recipe.flags, *parts, "-x", "none", *map(str, recipe.linked)]
    answer = subprocess.run([*command, "-o", str(path)], capture_output=True, text=True, errors="replace", check=False)
    if answer.returncode:
        lines = [line for line in answer.stderr.splitlines() if "error" in line] or ["the compiler printed no error"]
        why = f"the compiler {compiler[0]} failed: {lines[0].strip()}"
        if _SOURCE_ERROR.search(answer.stderr) and not _SHORTAGE.search(answer.stderr):
            raise SourceError(f"{why}; type {_TRY_AGAIN} to compile again")
        raise CompileError(why)


def _language(source: str) -> list[str]:
    """Return the compiler options that state the language of a source file; empty for a header."""
    return {".cpp": ["-x", "c++"], ".c": ["-x", "c"]}.get(Path(source).suffix, [])


def _reason(exc: Exception) -> str:
    if isinstance(exc, FileNotFoundError) and exc.filename and os.sep not in str(exc.filename):
        return f"no C++ compiler: {exc.filename} is not installed; install g++, or set CXX to another compiler"
    return str(exc)
