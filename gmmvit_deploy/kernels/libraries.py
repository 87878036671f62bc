"""Our kernels as libraries for the runtimes that are installed: compiled when first wanted, then kept.

An operation of OpenVINO is C++ and belongs to one version of it, so it cannot come ready-made with this package; nor
can C, whose package would be another for every platform. OpenVINO's own package brings its headers, ONNX Runtime's
interface needs none; what it takes is a C++ compiler, once, for some seconds.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import subprocess
from functools import lru_cache
from pathlib import Path

from gmmvit_deploy.extras import require

__all__ = ["onnxruntime_library", "openvino_library"]

_HERE = Path(__file__).parent
_ATTENTION = ("masked_attention.c", "masked_attention.h")
_FOR_OPENVINO = ("openvino_operations.cpp", *_ATTENTION, "residual_norm.c", "residual_norm.h")
_FOR_ONNXRUNTIME = ("onnxruntime_operations.c", *_ATTENTION)
_FLAGS = ["-O2", "-shared", "-fPIC"]
_LIBRARIES = ("libopenvino.so.*", "libtbb.so.*")


@lru_cache
def openvino_library() -> tuple[Path | None, str]:
    """(the library, ""); or (None, why there is none).

    It is kept in ``$XDG_CACHE_HOME/gmmvit-deploy``, by default ~/.cache. $CXX is the compiler, by default c++.
    Errors: MissingDependencyError without OpenVINO.
    """
    openvino = require("openvino", package="openvino", extra="openvino")
    root = Path(openvino.__file__).parent
    libraries = [sorted((root / "libs").glob(pattern)) for pattern in _LIBRARIES]
    if not (root / "include" / "openvino" / "core" / "parallel.hpp").exists() or not all(libraries):
        return None, f"OpenVINO {openvino.__version__} was installed without its headers; pip's package has them"
    flags = ["-isystem", str(root / "include"), "-DOV_THREAD=OV_THREAD_TBB"]
    linked = [str(found[0]) for found in libraries]
    return _library("openvino", _FOR_OPENVINO, flags, linked, str(openvino.__version__))


@lru_cache
def onnxruntime_library() -> tuple[Path | None, str]:
    """As `openvino_library`; for any ONNX Runtime, since its interface in C does not change."""
    return _library("onnxruntime", _FOR_ONNXRUNTIME, [], [], "")


def _library(
    name: str, sources: tuple[str, ...], flags: list[str], linked: list[str], version: str
) -> tuple[Path | None, str]:
    if platform.machine() != "x86_64":
        return None, f"it is written for x86-64, this is {platform.machine()}"
    parts = [word for one in sources if (told := _language(one)) for word in (*told, str(_HERE / one))]
    command = [*shlex.split(os.environ.get("CXX", "c++")), *_FLAGS, *flags, *parts, "-x", "none", *linked]
    named = hashlib.sha256(" ".join([version, *command]).encode())
    for source in sources:
        named.update((_HERE / source).read_bytes())
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gmmvit-deploy"
        library = folder / f"{name}-{named.hexdigest()[:16]}.so"
        folder.mkdir(parents=True, exist_ok=True)
        if not library.exists():
            _compile(command, library)
    # RuntimeError: nobody's home.
    except (OSError, RuntimeError, subprocess.CalledProcessError) as exc:
        return None, _reason(exc)
    return library, ""


def _language(source: str) -> list[str]:
    """What tells a C++ compiler's driver of it; empty for headers."""
    return {".cpp": ["-x", "c++"], ".c": ["-x", "c"]}.get(Path(source).suffix, [])


def _compile(command: list[str], library: Path) -> None:
    """Several processes may want it at once: one compiles, the others wait; nothing half-written bears its name."""
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return
        part = library.with_suffix(".part")
        subprocess.run([*command, "-o", str(part)], check=True, capture_output=True, text=True)
        part.replace(library)


def _reason(exc: Exception) -> str:
    if isinstance(exc, subprocess.CalledProcessError):
        lines = [line for line in str(exc.stderr).splitlines() if "error" in line] or ["it said nothing"]
        return f"the compiler {exc.cmd[0]} failed: {lines[0].strip()}"
    if isinstance(exc, FileNotFoundError) and exc.filename and os.sep not in str(exc.filename):
        return f"no C++ compiler: {exc.filename} is not there; install g++, or name another in CXX"
    return str(exc)
