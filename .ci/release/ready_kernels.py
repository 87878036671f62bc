"""Compile the kernels for ONNX Runtime for each architecture, so that a user of the wheel needs no compiler.

The compiler is Zig's (``zig cc``, a Clang), which has the headers and symbol versions of every C library. The libraries
need glibc 2.28 at most, the oldest that PyTorch's wheels support (manylinux_2_28).
"""

from __future__ import annotations

import os
import re
import struct
import sys
from importlib.util import find_spec
from pathlib import Path

from gmmvit_deploy.runtimes.kernels.libraries import READY_MACHINES, READY_SOURCES, ready_name
from release.steps import ReleaseError, run

__all__ = ["GLIBC", "KERNELS", "check_library", "check_ready", "make_ready"]

KERNELS = "gmmvit_deploy/runtimes/kernels"
GLIBC = (2, 28)
_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}  # e_machine of the ELF header
_EXPORTED = (b"RegisterCustomOps", b"masked_attention", b"gmmvit_instruction_set_name")


def make_ready(kernels: Path) -> None:
    """Compile the library for each architecture into the folder ``ready`` of the folder with the sources.

    Errors: ReleaseError when there is no Zig, or when it fails.
    """
    if find_spec("ziglang") is None:
        raise ReleaseError("no Zig, which compiles the kernels of the wheel", hint="pip install '.[dev]'")
    ready = kernels / "ready"
    ready.mkdir()
    sources = [name for name in READY_SOURCES if name.endswith(".c")]
    for machine in READY_MACHINES:
        target = f"{machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
        # Zig traps undefined behaviour by default; -s leaves debug information out.
        flags = ["-target", target, "-O2", "-fno-sanitize=all", "-shared", "-fPIC", "-s"]
        command = [sys.executable, "-m", "ziglang", "cc", *flags, *sources, "-lm"]
        out = str(ready / ready_name(kernels, machine))
        run([*command, "-o", out], f"compile the kernels for {machine}", cwd=kernels, environment=os.environ)


def check_ready(kernels: Path) -> list[str]:
    """Check that there is a library of these sources for each architecture; returns their names.

    Errors: ReleaseError when a library is missing, or as `check_library`.
    """
    names = [ready_name(kernels, machine) for machine in READY_MACHINES]
    for machine, name in zip(READY_MACHINES, names, strict=True):
        path = kernels / "ready" / name
        if not path.exists():
            raise ReleaseError(f"{path}: expected the kernels for {machine}, compiled from the sources beside them")
        check_library(path, machine)
    return names


def check_library(path: Path, machine: str) -> None:
    """Check the architecture of a library, what it exports, and the C library that it needs.

    Errors: ReleaseError.
    """
    data = path.read_bytes()
    actual = struct.unpack_from("<H", data, 18)[0] if data[:4] == b"\x7fELF" and len(data) > 20 else None
    if actual != _ELF_MACHINES[machine]:
        raise ReleaseError(f"{path.name}: expected an ELF file for {machine}, got machine {actual}")
    missing = [name.decode() for name in _EXPORTED if b"\0" + name + b"\0" not in data]
    if missing:
        raise ReleaseError(f"{path.name}: does not export {', '.join(missing)}")
    needed = [(int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", data)]
    if not needed or max(needed) > GLIBC:
        raise ReleaseError(f"{path.name}: expected symbols of glibc {GLIBC[0]}.{GLIBC[1]} at most, got {needed}")
