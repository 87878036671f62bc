"""Locate a Triton server on this machine, the server's backends, and the environment variables to start the server.

A server that the user names, or that is on PATH, is installed with a folder of backends. The server in the
nvidia-pytriton wheel has only the Python backend. The Python backend needs a stub, a program for the running Python
version, in the folder of the backend. The wheel must stay unchanged, so the backend and the stub are copied to a new
folder, where the stub is adapted to numpy 2.

The stub was compiled for numpy 1. It reads the size of an array's elements in
numpy's C structure PyArray_Descr (``elsize``), at byte 32 in numpy 1 and at byte 40 in numpy 2, where byte 32 has
flags. Under numpy 2, an unchanged stub therefore sends outputs without bytes, and reads the first byte of a string in
place of each of its bytes, without an error. Source: numpy's ndarraytypes.h; numpy's guide for the change from 1 to 2.

Five instructions read the size, the same in the stub of each Python version. `stub_for_numpy_2` writes the new
position into them. Only the copy that a server starts is changed. Everything else that the stub uses of numpy is the
same in both.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.progress import OnProgress, ignore
from gmmvit_deploy.serving.server_wheel import wheel_folder

_SYSTEM_BACKENDS = Path("/opt/tritonserver/backends")
_OLD, _NEW = b"\x20", b"\x28"  # bytes 32 and 40
_READS = (
    # movslq 32(%rax), %rax; imul %rdx, %rax; mov %rax, 104(%rbx): the size of an output
    (4, bytes.fromhex("48 63 40"), bytes.fromhex("48 0f af c2 48 89 43 68")),
    # mov %rax, %r14; mov (%rsi), %rax; mov 32(%rax), %eax; mov %eax, …: the strides of an input
    (1, bytes.fromhex("49 89 c6 48 8b 06 8b 40"), bytes.fromhex("89")),
)
"""(how often it occurs, code up to the position, code after the position)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInstall:
    """A Triton server on this machine.

    kind: ``wheel`` for the server of nvidia-pytriton, else ``system``.  binary: the path of ``tritonserver``.
    backends: the folder of the server's backends.
    environment: the variables to add to the environment of the server; all other variables are inherited.
    """

    kind: Literal["system", "wheel"]
    binary: Path
    backends: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def backend_names(self) -> tuple[str, ...]:
        return tuple(sorted(folder.name for folder in self.backends.glob("*") if folder.is_dir()))

    @property
    def best_backend(self) -> Literal["onnxruntime", "python"]:
        """Return the backend that runs an ONNX network: ``onnxruntime`` (C++) if the server has it, else ``python``."""
        return "onnxruntime" if "onnxruntime" in self.backend_names else "python"


def find_server(given: Path | None = None, *, on_progress: OnProgress = ignore) -> ServerInstall:
    """Return the server at ``given``, else the server on PATH, else the server of the nvidia-pytriton wheel.

    Errors: those of `system_server` and `wheel_server`.
    """
    if given is not None:
        return system_server(given)
    on_path = shutil.which("tritonserver")
    return system_server(Path(on_path)) if on_path else wheel_server(on_progress)


def system_server(binary: Path) -> ServerInstall:
    """Return the server ``binary`` with the folder ``backends`` of its installation, or of NVIDIA's containers.

    Errors: ServerError when ``binary`` is not an executable file.
    """
    if not binary.is_file() or not os.access(binary, os.X_OK):
        raise ServerError(
            f"{binary}: expected an executable tritonserver program",
            hint="type --tritonserver with the path of the program, or leave it out",
        )
    beside = binary.resolve().parent.parent / "backends"
    return ServerInstall(kind="system", binary=binary, backends=beside if beside.is_dir() else _SYSTEM_BACKENDS)


def wheel_server(on_progress: OnProgress = ignore) -> ServerInstall:
    """Return the server of the nvidia-pytriton wheel, which is downloaded if it is not here.

    Errors: those of `wheel_folder`, and ServerError for a Python without a stub, or without a shared libpython.
    """
    packages = wheel_folder(on_progress)
    root = packages / "pytriton" / "tritonserver"
    stub = _stub_folder(root) / "triton_python_backend_stub"
    if not stub.is_file():
        there = ", ".join(sorted(folder.name for folder in stub.parent.parent.iterdir()))
        raise ServerError(
            "the nvidia-pytriton wheel has no triton_python_backend_stub for Python "
            f"{sys.version_info.major}.{sys.version_info.minor}",
            hint=f"use a Python version that the nvidia-pytriton wheel supports: {there}",
        )
    libraries = [_libpython_folder(), packages / "nvidia_pytriton.libs"]
    inherited = os.environ.get("LD_LIBRARY_PATH")
    return ServerInstall(
        kind="wheel",
        binary=root / "bin" / "tritonserver",
        backends=root / "backends",
        environment={
            "LD_LIBRARY_PATH": os.pathsep.join([*map(str, libraries), *([inherited] if inherited else [])]),
            # The stub runs the first python3 on PATH, and imports the packages that are installed for this python3.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        },
    )


def stage_backends(install: ServerInstall, folder: Path) -> Path:
    """Return the server's folder of backends; for the server of the wheel, create that folder below ``folder``."""
    if install.kind != "wheel":
        return install.backends
    staged = folder / "backends" / "python"
    shutil.copytree(install.backends / "python", staged, ignore=shutil.ignore_patterns("__pycache__"))
    stub = Path(shutil.copy2(_stub_folder(install.backends.parent) / "triton_python_backend_stub", staged))
    if int(version("numpy").partition(".")[0]) >= 2:
        stub.write_bytes(stub_for_numpy_2(stub.read_bytes()))
    return staged.parent


def stub_for_numpy_2(stub: bytes) -> bytes:
    """Return the stub for numpy 2.  Errors: ServerError when it is not that of the wheel's version."""
    for count, before, after in _READS:
        if stub.count(before + _OLD + after) != count:
            raise ServerError(
                "the Python stub of the installed nvidia-pytriton is not one that this package can use with numpy 2",
                hint="pip uninstall nvidia-pytriton: gmmvit then fetches the version that it was written for",
            )
        stub = stub.replace(before + _OLD + after, before + _NEW + after)
    return stub


def _stub_folder(root: Path) -> Path:
    return root / "python_backend_stubs" / f"{sys.version_info.major}.{sys.version_info.minor}"


def _libpython_folder() -> Path:
    name = sysconfig.get_config_var("INSTSONAME") or sysconfig.get_config_var("LDLIBRARY") or ""
    candidates = [Path(sysconfig.get_config_var("LIBDIR") or "/"), Path(sys.base_prefix) / "lib"]
    for folder in candidates:
        if ".so" in name and (folder / name).exists():
            return folder
    raise ServerError(
        f"Triton's Python backend needs a shared libpython, but this Python has no {name} in {candidates[0]}",
        hint="use a Python that was built with --enable-shared, such as the Python of your Linux distribution",
    )
