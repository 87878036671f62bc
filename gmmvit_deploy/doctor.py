"""What this machine can run, found out by running it, and the one command that adds the rest."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from gmmvit_deploy.errors import GmmvitError
from gmmvit_deploy.extras import require
from gmmvit_deploy.serving.installs import ServerInstall, find_server

__all__ = ["Check", "examine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing and whether it works here.  fix: the command that adds it; empty when none can."""

    kind: Literal["package", "runner", "engine", "server", "hardware"]
    name: str
    works: bool
    detail: str
    fix: str = ""


_PACKAGES = {
    "torch": "",
    "onnx": "",
    "onnxscript": "",
    "safetensors": "",
    "pillow": "",
    "numpy": "",
    "onnxruntime": "cpu",
    "tritonclient": "client",
    "nvidia-pytriton": "serve",
    "scikit-learn": "demo",
}


def examine() -> list[Check]:
    """Try everything.  Never raises: what fails is reported with its reason."""
    return [
        Check(
            kind="hardware", name="python", works=True, detail=f"{platform.python_version()} on {platform.platform()}"
        ),
        Check(kind="hardware", name="cpu", works=True, detail=f"{os.cpu_count()} cores, {platform.machine()}"),
        _tried("hardware", "nvidia gpu", _gpu, fix=""),
        *(_package(name, extra) for name, extra in _PACKAGES.items()),
        _tried("runner", "eager", _eager, fix="pip install gmmvit-deploy"),
        _tried("runner", "onnxruntime", _onnxruntime, fix=_install("cpu")),
        _tried("runner", "triton-grpc", lambda: _client("grpc"), fix=_install("client")),
        _tried("runner", "triton-http", lambda: _client("http"), fix=_install("client")),
        _tried("engine", "tensorrt", lambda: _importable("tensorrt"), fix="pip install tensorrt"),
        _tried("engine", "tensorrt-rtx", lambda: _importable("tensorrt_rtx"), fix="pip install tensorrt-rtx-cu12"),
        _tried("server", "tritonserver", _server, fix=_install("serve")),
    ]


def _install(extra: str) -> str:
    return f"pip install 'gmmvit-deploy[{extra}]'"


def _tried(
    kind: Literal["runner", "engine", "server", "hardware"], name: str, attempt: Callable[[], str], *, fix: str
) -> Check:
    try:
        return Check(kind=kind, name=name, works=True, detail=attempt())
    except GmmvitError as exc:
        own_hint = exc.hint if exc.hint != exc.usual_hint else fix
        return Check(kind=kind, name=name, works=False, detail=str(exc), fix=own_hint)
    # A broken install fails in whatever way it likes; to report it is what this is for.
    except Exception as exc:
        return Check(kind=kind, name=name, works=False, detail=f"{type(exc).__name__}: {exc}"[:200], fix=fix)


def _package(name: str, extra: str) -> Check:
    fix = _install(extra) if extra else "pip install gmmvit-deploy"
    try:
        return Check(kind="package", name=name, works=True, detail=version(name))
    except PackageNotFoundError:
        return Check(kind="package", name=name, works=False, detail="not installed", fix=fix)


def _gpu() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as exc:
        raise GmmvitError("none found (nvidia-smi does not answer); nothing above needs one") from exc
    return answer.stdout.strip().replace("\n", "; ")


def _eager() -> str:
    torch = require("torch", package="torch", extra="cpu")
    product = torch.ones(2, 2) @ torch.ones(2, 2)
    if float(product.sum()) != 8.0:
        raise GmmvitError("torch multiplies wrongly here")
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads"


def _onnxruntime() -> str:
    import numpy as np
    from onnx import TensorProto, helper

    onnxruntime = require("onnxruntime", package="onnxruntime", extra="cpu")
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Gelu", ["x"], ["y"])],
        "probe",
        [value("x", TensorProto.FLOAT, [1])],
        [value("y", TensorProto.FLOAT, [1])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (answer,) = session.run(None, {"x": np.zeros(1, np.float32)})
    if answer[0] != 0:
        raise GmmvitError("ONNX Runtime gives wrong answers here")
    return f"onnxruntime {onnxruntime.__version__}, opset 20 runs"


def _client(protocol: str) -> str:
    require(f"tritonclient.{protocol}", package="tritonclient", extra="client")
    return f"tritonclient {version('tritonclient')}; needs a server to talk to"


def _importable(module: str) -> str:
    try:
        found = __import__(module)
    except ImportError as exc:
        raise GmmvitError("not installed") from exc
    return f"{found.__version__} is installed; building engines is not part of this version yet"


def _server() -> str:
    install = find_server()
    _start_once(install)
    return f"{install.binary} ({install.kind}); backends: {', '.join(install.backend_names) or 'none'}"


def _start_once(install: ServerInstall) -> None:
    """``--help`` loads every library that the program links, and stops."""
    environment = {**os.environ, **install.environment}
    try:
        answer = subprocess.run(
            [str(install.binary), "--help"], capture_output=True, text=True, timeout=60, env=environment
        )
    except (OSError, subprocess.SubprocessError) as exc:
        raise GmmvitError(f"{install.binary} does not start: {exc}") from exc
    if "--model-repository" not in answer.stdout + answer.stderr:
        raise GmmvitError(f"{install.binary} does not start: {(answer.stderr or answer.stdout).strip()[:160]}")
