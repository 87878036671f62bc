"""Our kernels as a library for the OpenVINO that is installed: compiled when first wanted, then kept.

An operation of OpenVINO is C++ and belongs to one version of it, so it cannot come ready-made with this package.
OpenVINO's own package brings the headers; what it takes is a C++ compiler, once, for some seconds.
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

__all__ = ["openvino_library"]

_HERE = Path(__file__).parent
_SOURCES = ("openvino_operations.cpp", "masked_attention.c", "masked_attention.h", "residual_norm.c", "residual_norm.h")
_LIBRARIES = ("libopenvino.so.*", "libtbb.so.*")


@lru_cache
def openvino_library() -> tuple[Path | None, str]:
    """(the library, ""); or (None, why there is none).

    It is kept in ``$XDG_CACHE_HOME/gmmvit-deploy``, by default ~/.cache. $CXX is the compiler, by default c++.
    Errors: MissingDependencyError without OpenVINO.
    """
    openvino = require("openvino", package="openvino", extra="openvino")
    if platform.machine() != "x86_64":
        return None, f"it is written for x86-64, this is {platform.machine()}"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    command = _command(compiler, Path(openvino.__file__).parent)
    if command is None:
        return None, f"OpenVINO {openvino.__version__} was installed without its headers; pip's package has them"
    named = hashlib.sha256(" ".join([str(openvino.__version__), *command]).encode())
    for source in _SOURCES:
        named.update((_HERE / source).read_bytes())
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gmmvit-deploy"
        library = folder / f"openvino-{named.hexdigest()[:16]}.so"
        folder.mkdir(parents=True, exist_ok=True)
        if not library.exists():
            _compile(command, library)
    # RuntimeError: nobody's home.
    except (OSError, RuntimeError, subprocess.CalledProcessError) as exc:
        return None, _reason(exc)
    return library, ""


def _command(compiler: list[str], openvino: Path) -> list[str] | None:
    """All but the output; None where headers or libraries are missing."""
    libraries = [sorted((openvino / "libs").glob(pattern)) for pattern in _LIBRARIES]
    if not (openvino / "include" / "openvino" / "core" / "parallel.hpp").exists() or not all(libraries):
        return None
    flags = ["-O2", "-shared", "-fPIC", "-isystem", str(openvino / "include"), "-DOV_THREAD=OV_THREAD_TBB"]
    kernels = [str(_HERE / source) for source in _SOURCES if source.endswith(".c")]
    sources = ["-x", "c++", str(_HERE / _SOURCES[0]), "-x", "c", *kernels, "-x", "none"]
    return [*compiler, *flags, *sources, *(str(found[0]) for found in libraries)]


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
