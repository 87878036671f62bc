"""Our kernels as libraries for the runtimes that are installed: compiled on first use, then kept in a cache.

An operation of OpenVINO is C++ and belongs to one version of it, so it cannot come ready-made with this package; nor
can C, whose package would be another for every platform. OpenVINO's own package brings its headers, ONNX Runtime's
interface needs none; what it takes is a C++ compiler, once, for some seconds.

A library is kept under a key of the compiler (its arguments and what ``$CXX --version`` answers), the flags, the
sources and the version of what it is compiled against. The place of this package is no part of the key. An
error that the compiler reports in the sources is recorded under the same key, so no other process tries again
(`cache.py`); a failure for want of memory or disk is not.
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
from gmmvit_deploy.kernels.cache import CompileError, SourceError, compiled, empty_cache, recorded_failure

__all__ = ["empty_kernel_cache", "onnxruntime_library", "openvino_library", "why_recorded"]

_HERE = Path(__file__).parent
_ATTENTION = ("masked_attention.c", "masked_attention.h")
_FOR_OPENVINO = ("openvino_operations.cpp", *_ATTENTION, "residual_norm.c", "residual_norm.h")
_FOR_ONNXRUNTIME = ("onnxruntime_operations.c", *_ATTENTION)
_FLAGS = ("-O2", "-shared", "-fPIC")
_SOURCE_ERROR = re.compile(r":\d+: (fatal )?error: ")
"""A line and a number before the message, as g++ and clang++ report an error in a source."""
_SHORTAGE = re.compile(r"no space left|disk quota|out of memory|memory exhausted|cannot allocate|killed", re.IGNORECASE)
"""What compilers report, some with a place in a source, where the machine ran out of something."""
_TRY_AGAIN = "gmmvit doctor --empty-kernel-cache"
_LIBRARIES = ("libopenvino.so.*", "libtbb.so.*")


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What to compile.  flags: the same wherever things are installed.  include, linked: by place.

    against: name and version of what include and linked belong to.
    """

    name: str
    sources: tuple[str, ...]
    flags: tuple[str, ...] = ()
    include: tuple[Path, ...] = ()
    linked: tuple[Path, ...] = ()
    against: str = ""


@lru_cache
def openvino_library() -> tuple[Path | None, str]:
    """(the library, ""); or (None, why there is none).

    It is kept in ``$XDG_CACHE_HOME/gmmvit-deploy/kernels``, by default ~/.cache. $CXX is the compiler, by default c++.
    Errors: MissingDependencyError without OpenVINO.
    """
    recipe, why = _openvino_recipe()
    return (None, why) if recipe is None else _library(recipe)


@lru_cache
def onnxruntime_library() -> tuple[Path | None, str]:
    """As `openvino_library`; for any ONNX Runtime, since its interface in C does not change."""
    return _library(_ONNXRUNTIME)


def why_recorded(name: str) -> str:
    """The file that keeps every process from compiling the library ``onnxruntime`` or ``openvino`` again, or "".

    Errors: as `openvino_library`.
    """
    recipe = _ONNXRUNTIME if name == "onnxruntime" else _openvino_recipe()[0]
    try:
        path = None if recipe is None else recorded_failure(_stem(recipe, _compiler()))
    except (OSError, RuntimeError, ValueError):  # no compiler, or no home directory: nothing can be recorded
        return ""
    return str(path or "")


def empty_kernel_cache() -> tuple[list[Path], list[Path]]:
    """Remove compiled libraries and recorded failures, so that the next use compiles again.

    Returns (what was removed, the libraries left because a living process uses them).
    Errors: RuntimeError when no home directory is known; OSError when a file cannot be removed.
    """
    emptied = empty_cache()
    for known in (openvino_library, onnxruntime_library):
        known.cache_clear()
    return emptied


_ONNXRUNTIME = _Recipe("onnxruntime", _FOR_ONNXRUNTIME)


def _openvino_recipe() -> tuple[_Recipe | None, str]:
    openvino = require("openvino", package="openvino", extra="openvino")
    root = Path(openvino.__file__).parent
    libraries = [sorted((root / "libs").glob(pattern)) for pattern in _LIBRARIES]
    if not (root / "include" / "openvino" / "core" / "parallel.hpp").exists() or not all(libraries):
        return None, f"OpenVINO {openvino.__version__} was installed without its headers; pip's package has them"
    return _Recipe(
        "openvino",
        _FOR_OPENVINO,
        flags=("-DOV_THREAD=OV_THREAD_TBB",),
        include=(root / "include",),
        linked=tuple(paths[0] for paths in libraries),
        against=f"openvino {openvino.__version__}",
    ), ""


def _library(recipe: _Recipe) -> tuple[Path | None, str]:
    if platform.machine() != "x86_64":
        return None, f"it is written for x86-64, this is {platform.machine()}"
    try:
        compiler = _compiler()
        return compiled(_stem(recipe, compiler), lambda path: _compile(recipe, compiler, path)), ""
    # `Path.home()` raises RuntimeError when HOME is unset; a lone quote in $CXX is a ValueError.
    except (OSError, RuntimeError, ValueError, CompileError) as exc:
        return None, _reason(exc)


def _compiler() -> list[str]:
    """$CXX, which may have arguments, or c++."""
    return shlex.split(os.environ.get("CXX") or "c++") or ["c++"]


def _stem(recipe: _Recipe, compiler: list[str]) -> str:
    """Name and key of a library.  Errors: OSError when the compiler cannot be started."""
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
    """Errors: SourceError when the compiler reports an error in the sources; CompileError on any other failure."""
    include = [word for folder in recipe.include for word in ("-isystem", str(folder))]
    parts = [word for name in recipe.sources if (kind := _language(name)) for word in (*kind, str(_HERE / name))]
    command = [*compiler, *_FLAGS, *include, *recipe.flags, *parts, "-x", "none", *map(str, recipe.linked)]
    answer = subprocess.run([*command, "-o", str(path)], capture_output=True, text=True, errors="replace", check=False)
    if answer.returncode:
        lines = [line for line in answer.stderr.splitlines() if "error" in line] or ["it said nothing"]
        why = f"the compiler {compiler[0]} failed: {lines[0].strip()}"
        if _SOURCE_ERROR.search(answer.stderr) and not _SHORTAGE.search(answer.stderr):
            raise SourceError(f"{why}; to try again: {_TRY_AGAIN}")
        raise CompileError(why)


def _language(source: str) -> list[str]:
    """The compiler's options for a source; empty for headers."""
    return {".cpp": ["-x", "c++"], ".c": ["-x", "c"]}.get(Path(source).suffix, [])


def _reason(exc: Exception) -> str:
    if isinstance(exc, FileNotFoundError) and exc.filename and os.sep not in str(exc.filename):
        return f"no C++ compiler: {exc.filename} is not there; install g++, or name another in CXX"
    return str(exc)
