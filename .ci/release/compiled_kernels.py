"""Compile the CPU kernels for the wheel of a platform, with the Debian compiler of its architecture.

The library works with the version of OpenVINO that is installed here. Its kernels for each instruction set are chosen
when it runs. For another architecture than this machine's, pip downloads the same OpenVINO.
"""

from __future__ import annotations

import os
import platform as this_machine
import re
import sys
import zipfile
from pathlib import Path

from gmmvit_deploy.runtimes.kernels.libraries import CompileError, compile_for_wheel
from release.steps import ReleaseError, run

__all__ = ["PLATFORMS", "check_symbols", "compiled_kernels"]

PLATFORMS = {
    "manylinux_2_34_x86_64": {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13)},
    "manylinux_2_35_aarch64": {"GLIBC": (2, 35), "GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13)},
}
"""Tag → the newest versions of symbols in its C and C++ libraries: the policies of manylinux, as in auditwheel.

OpenVINO's own wheels are manylinux_2_28_x86_64 and manylinux_2_35_aarch64.
"""
_SYMBOL_VERSION = re.compile(rb"\0(GLIBC|GLIBCXX|CXXABI)_([0-9.]+)(?=\0)")


def compiled_kernels(platform: str, folder: Path) -> Path:
    """Compile the library into ``folder``/``platform``, and return its path.  Errors: ReleaseError."""
    import openvino

    machine = platform.split("_", 3)[3]
    version, package = openvino.__version__, Path(openvino.__file__).parent
    if machine != this_machine.machine():
        package = _downloaded(version, machine, folder / machine)
    (folder / platform).mkdir()
    compiler = f"{machine}-linux-gnu-g++"
    try:
        library = compile_for_wheel(package, version, [compiler], folder / platform)
    except CompileError as exc:
        raise ReleaseError(f"{platform}: {exc}") from exc
    except FileNotFoundError as exc:
        raise ReleaseError(
            f"{platform}: there is no {compiler} on PATH",
            hint=f"on Debian: apt-get install g++-{machine.replace('_', '-')}-linux-gnu",
        ) from exc
    check_symbols(library, PLATFORMS[platform])
    return library


def _downloaded(version: str, machine: str, folder: Path) -> Path:
    """Return the folder of OpenVINO's package for another architecture.  Errors: ReleaseError."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
    ]
    tags = [word for glibc in ("2_28", "2_35") for word in ("--platform", f"manylinux_{glibc}_{machine}")]
    release = version.partition("-")[0]
    run([*pip, *tags, f"openvino=={release}"], f"download OpenVINO for {machine}", environment=os.environ)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    (library,) = (folder / "openvino" / "libs").glob("libopenvino.so.*")
    if version.encode() not in library.read_bytes():
        raise ReleaseError(f"{wheel.name}: expected the OpenVINO that is installed here, {version}, got another build")
    return folder / "openvino"


def check_symbols(library: Path, limits: dict[str, tuple[int, ...]]) -> None:
    """Refuse a library that needs newer C and C++ libraries than its platform has.  Errors: ReleaseError."""
    for name, text in _SYMBOL_VERSION.findall(library.read_bytes()):
        if tuple(map(int, text.decode().split("."))) > limits[name.decode()]:
            raise ReleaseError(f"{library}: needs {name.decode()}_{text.decode()}, which its platform does not have")
