"""Locate the Triton server of this machine, and provide what is needed to start it.

A server on PATH, or named by the user, has its backends in its own folder. The server of the nvidia-pytriton wheel
has only the Python backend and needs a separate backend folder: the stub for the running interpreter must lie beside
the backend, and the wheel itself stays unchanged.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gmmvit_deploy.errors import MissingDependencyError, ServerError

__all__ = ["ServerInstall", "find_server", "system_server", "wheel_server"]

_SYSTEM_BACKENDS = Path("/opt/tritonserver/backends")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInstall:
    """An installed Triton server.

    kind: ``wheel`` for the server of nvidia-pytriton, else ``system``.  binary: path of ``tritonserver``.
    backends: folder of the backends that it may load.  environment: variables to add to those of this process.
    """

    kind: Literal["system", "wheel"]
    binary: Path
    backends: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def backend_names(self) -> tuple[str, ...]:
        names = (
            {folder.name for folder in self.backends.iterdir() if folder.is_dir()} if self.backends.is_dir() else set()
        )
        return tuple(sorted(names))

    @property
    def best_backend(self) -> Literal["onnxruntime", "python"]:
        """The backend that runs an ONNX network: ``onnxruntime`` (C++) if available, else ``python``."""
        return "onnxruntime" if "onnxruntime" in self.backend_names else "python"


def find_server(given: Path | None = None) -> ServerInstall:
    """Return the server at ``given``, else the server on PATH, else the server of the nvidia-pytriton wheel.

    Errors: ServerError when ``given`` is not an executable file, or the wheel's server cannot work here;
    MissingDependencyError when no server is installed.
    """
    if given is not None:
        return system_server(given)
    on_path = shutil.which("tritonserver")
    return system_server(Path(on_path)) if on_path else wheel_server()


def system_server(binary: Path) -> ServerInstall:
    """Return a server with its backends beside it, as in NVIDIA's containers.

    Errors: ServerError when ``binary`` is not an executable file.
    """
    if not binary.is_file() or not os.access(binary, os.X_OK):
        raise ServerError(f"{binary}: expected an executable tritonserver program")
    beside = binary.resolve().parent.parent / "backends"
    return ServerInstall(kind="system", binary=binary, backends=beside if beside.is_dir() else _SYSTEM_BACKENDS)


def wheel_server() -> ServerInstall:
    """Return the server of the nvidia-pytriton wheel.

    Errors: MissingDependencyError when the wheel is absent; ServerError when this interpreter or
    numpy cannot work with it.
    """
    package = importlib.util.find_spec("pytriton")
    if package is None or package.origin is None:
        raise MissingDependencyError("a Triton server (nvidia-pytriton)", extra="serve")
    root = Path(package.origin).parent / "tritonserver"
    stub = _stub_folder(root) / "triton_python_backend_stub"
    if not stub.is_file():
        there = ", ".join(sorted(folder.name for folder in stub.parent.parent.iterdir()))
        raise ServerError(
            f"the nvidia-pytriton wheel has no stub for Python {sys.version_info.major}.{sys.version_info.minor}",
            hint=f"use a Python that it has a stub for: {there}",
        )
    _require_old_numpy()
    libraries = [_libpython_folder(), root.parent.parent / "nvidia_pytriton.libs"]
    inherited = os.environ.get("LD_LIBRARY_PATH")
    return ServerInstall(
        kind="wheel",
        binary=root / "bin" / "tritonserver",
        backends=root / "backends",
        environment={
            "LD_LIBRARY_PATH": os.pathsep.join([*map(str, libraries), *([inherited] if inherited else [])]),
            # The stub takes its Python, and so its packages, from the first python3 on PATH.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        },
    )


def stage_backends(install: ServerInstall, folder: Path) -> Path:
    """Return a backend folder for the server; for the wheel's server it is created below ``folder``."""
    if install.kind != "wheel":
        return install.backends
    staged = folder / "backends" / "python"
    shutil.copytree(install.backends / "python", staged, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(_stub_folder(install.backends.parent) / "triton_python_backend_stub", staged)
    return staged.parent


def _stub_folder(root: Path) -> Path:
    return root / "python_backend_stubs" / f"{sys.version_info.major}.{sys.version_info.minor}"


def _libpython_folder() -> Path:
    name = sysconfig.get_config_var("INSTSONAME") or sysconfig.get_config_var("LDLIBRARY") or ""
    candidates = [Path(sysconfig.get_config_var("LIBDIR") or "/"), Path(sys.base_prefix) / "lib"]
    for folder in candidates:
        if ".so" in name and (folder / name).exists():
            return folder
    raise ServerError(
        f"this Python has no shared libpython ({name} in {candidates[0]}), which Triton's Python backend loads",
        hint="use a Python that was built with --enable-shared, such as your distribution's",
    )


def _require_old_numpy() -> None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version("numpy")
    except PackageNotFoundError as exc:
        raise MissingDependencyError("numpy", extra="serve") from exc
    if int(installed.split(".")[0]) >= 2:
        # With numpy 2 the outputs had the right shapes and no bytes, without any error.
        raise ServerError(
            f"the server of nvidia-pytriton returns empty outputs under numpy {installed}",
            hint="pip install 'gmmvit-deploy[serve]', which takes numpy 1.26",
        )
