"""Import ONNX Runtime, of which two distributions exist: ``onnxruntime`` for CPUs, ``onnxruntime-gpu`` for GPUs too.

Both distributions install the same files of the package ``onnxruntime``. If both are installed, the files of the last
installation remain, and removing one distribution removes files of the other.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from gmmvit_deploy.errors import GmmvitError, MissingDependencyError
from gmmvit_deploy.extras import require

__all__ = ["INSTALL_ONNXRUNTIME", "MEND_ONNXRUNTIME", "import_onnxruntime", "require_onnxruntime"]

_DISTRIBUTIONS = ("onnxruntime", "onnxruntime-gpu")
_GPU = "pip install 'gmmvit-deploy[gpu]'"
INSTALL_ONNXRUNTIME = f"pip install 'gmmvit-deploy[cpu]', or {_GPU} on a machine with an NVIDIA GPU"
MEND_ONNXRUNTIME = f"pip uninstall -y {' '.join(_DISTRIBUTIONS)}, then {INSTALL_ONNXRUNTIME}"


def require_onnxruntime() -> str:
    """Return distribution and version of the installed ONNX Runtime, without importing it: ``onnxruntime-gpu 1.31.1``.

    Errors: MissingDependencyError when ONNX Runtime is not installed.
    GmmvitError when both distributions are installed.
    """
    there = [f"{name} {number}" for name in _DISTRIBUTIONS if (number := _version(name))]
    if len(there) > 1:
        raise GmmvitError(
            f"{' and '.join(there)} are both installed, and each overwrites files of the other",
            hint=MEND_ONNXRUNTIME,
        )
    if there:
        return there[0]
    if importlib.util.find_spec("onnxruntime") is None:
        raise MissingDependencyError("onnxruntime", extra="cpu", hint=INSTALL_ONNXRUNTIME)
    return "onnxruntime of another distribution"  # such as onnxruntime-openvino, or a build from source


def import_onnxruntime() -> Any:
    """Import ONNX Runtime.

    Errors: as `require_onnxruntime`.
    GmmvitError when files of the package are missing.
    """
    name = require_onnxruntime()
    onnxruntime = require("onnxruntime", package="onnxruntime", extra="cpu")
    if not hasattr(onnxruntime, "InferenceSession"):
        raise GmmvitError(f"{name}: files of the package are missing", hint=MEND_ONNXRUNTIME)
    return onnxruntime


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
