"""Find the library of this project's kernels for OpenVINO: in the wheel, else in a cache, else compiled on first use.

A compiled OpenVINO operation works with a single version of OpenVINO. A wheel for a platform (`.ci/release`) has a
library for one version, beside this file. For other versions, and for the wheel without a library, the first use
compiles: this needs a C++ compiler and takes some seconds. OpenVINO's package contains the headers. The library
contains the kernels for all instruction sets of the processor's architecture, and chooses the best when the program
runs (`instruction_sets.c`).

    <folder>/openvino-<key>.so   a compiled library
    <folder>/compiling           the lock file of a process that compiles; it is never removed

The folder is ``$XDG_CACHE_HOME/gmmvit-deploy/kernels``; without XDG_CACHE_HOME it is
``~/.cache/gmmvit-deploy/kernels``. The key is a hash of the compiler's arguments and the output of ``$CXX --version``,
the flags, the sources, and the version of OpenVINO.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shlex
import subprocess
import tempfile
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


class CompileError(Exception):
    """A library could not be compiled."""


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
        library = cache_folder() / "kernels" / _name_in_cache(version, compiler)
        if not library.exists():
            _compile_once(library, compiler, _arguments(Path(openvino.__file__).parent))
        return library, ""
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


# ---- compile -------------------------------------------------------------------------------------------------------


def _sources() -> list[Path]:
    return sorted(path for path in _HERE.iterdir() if path.suffix in _LANGUAGES)


def _name_in_cache(version: str, compiler: list[str]) -> str:
    """Return the file name of the library that this compiler makes.  Errors: OSError when it does not start."""
    answer = subprocess.run([*compiler, "--version"], capture_output=True, text=True, errors="replace", check=False)
    return f"openvino-{_key(version, [*compiler, answer.stdout, answer.stderr])}.so"


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
    """Run the compiler.  Errors: CompileError when it fails."""
    answer = subprocess.run([*compiler, *arguments], capture_output=True, text=True, errors="replace", check=False)
    if answer.returncode:
        lines = [line for line in answer.stderr.splitlines() if "error" in line] or ["the compiler printed no error"]
        raise CompileError(f"the compiler {compiler[0]} failed: {lines[0].strip()}")


def _compile_once(library: Path, compiler: list[str], arguments: list[str]) -> None:
    """Compile a library that does not exist yet.  The first of several processes compiles; the others wait.

    Errors: CompileError when the compiler fails; OSError when the folder cannot be used.
    """
    library.parent.mkdir(parents=True, exist_ok=True)
    with (library.parent / "compiling").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=f"{library.stem}.") as folder:
            part = Path(folder) / library.name
            _compile(compiler, [*arguments, "-o", str(part)])
            part.replace(library)


def _reason(exc: Exception, version: str) -> str:
    if isinstance(exc, FileNotFoundError) and exc.filename and os.sep not in str(exc.filename):
        why = f"no C++ compiler: {exc.filename} is not installed; install g++, or set CXX to another compiler"
        for shipped in _HERE.glob("openvino-*.so"):
            compiled_for = shipped.name.split("-")[1]
            why += f", or OpenVINO {compiled_for}: the wheel's library is not for {_release(version)}"
        return why
    return str(exc)
