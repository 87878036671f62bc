"""Check which parts of the toolkit work on this machine, by running each part.

A part that does not work is listed with the reason. If a command installs the part, the command is also listed.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.choices import read_choices
from gmmvit_deploy.bundle.variants import forms_in, graph_file, open_variant
from gmmvit_deploy.errors import GmmvitError
from gmmvit_deploy.extras import require
from gmmvit_deploy.files.leftovers import temporary_folder
from gmmvit_deploy.inference.cores import cores_in_words
from gmmvit_deploy.inference.precision import ONNXRUNTIME_PRECISIONS, OPENVINO_PRECISIONS, SPECS, Form, Precision
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.runtimes.engines.builder import build_plan
from gmmvit_deploy.runtimes.engines.card import CARD_FILE, EngineCard, open_engine, require_bundle
from gmmvit_deploy.runtimes.engines.compatibility import ServerTensorRT, loads_in, loads_on, runs_on
from gmmvit_deploy.runtimes.engines.flavors import FLAVORS, find_flavor, refuse, visible_gpu
from gmmvit_deploy.runtimes.engines.options import BuildOptions, Profile
from gmmvit_deploy.runtimes.engines.releases import triton_in_words
from gmmvit_deploy.runtimes.kernels.libraries import openvino_library
from gmmvit_deploy.runtimes.programs.onnxruntime import import_onnxruntime, require_onnxruntime
from gmmvit_deploy.runtimes.programs.onnxruntime_providers import (
    CPU,
    CUDA,
    TENSORRT,
    require_provider,
    session_on_providers,
)
from gmmvit_deploy.runtimes.programs.openvino import our_kernels
from gmmvit_deploy.runtimes.runners.chosen import this_machine
from gmmvit_deploy.runtimes.runners.speed import measured_speed, speed_in_words
from gmmvit_deploy.serving.gateway.haproxy import INSTALL_HAPROXY, find_haproxy, haproxy_version
from gmmvit_deploy.serving.installs import ServerInstall, find_server
from gmmvit_deploy.serving.names import OLDEST_CUDA_RELEASE, OLDEST_RELEASE
from gmmvit_deploy.serving.server_wheel import PACKAGE

_BUILT_FOR = "8.9"


Kind = Literal["package", "runner", "kernel", "engine", "server", "hardware", "graph", "speed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of checking a part of the toolkit.

    works: True if the part works on this machine.
    detail: version and abilities of the part, or the reason of the failure.
    fix: the command that makes the part work; empty if no command helps.
    """

    kind: Kind
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
    "openvino": "openvino",
    "mlcommons-loadgen": "bench",
    "tritonclient": "client",
    "scikit-learn": "demo",
    "timm": "timm",
    "transformers": "transformers",
    "tensorboard": "train",
    "fsspec": "bulk",
    "pyarrow": "bulk",
    "ray": "ray",
}


_GPU = {"onnxruntime-cuda": CUDA, "onnxruntime-tensorrt": TENSORRT}
"""Runner → provider of ONNX Runtime."""


def examine(*, on_progress: OnProgress = ignore) -> list[Check]:
    """Check every part of the toolkit on this machine.  A failure raises no error: the result contains the reason."""
    return _examined(_parts(), on_progress)


def _examined(parts: Sequence[tuple[str, Callable[[], Check]]], on_progress: OnProgress) -> list[Check]:
    checks = []
    for number, (name, check) in enumerate(parts):
        on_progress(Progress(f"check {name}", number, len(parts)))
        checks.append(check())
    return checks


def _parts() -> list[tuple[str, Callable[[], Check]]]:
    """Return (name, function that checks the part) for every part.  A check takes up to a minute."""
    python = f"{platform.python_version()} on {platform.platform()}"
    cpu = f"{cores_in_words()}, {platform.machine()}"
    return [
        ("python", lambda: Check(kind="hardware", name="python", works=True, detail=python)),
        ("cpu", lambda: Check(kind="hardware", name="cpu", works=True, detail=cpu)),
        _part("hardware", "nvidia gpu", _gpu, fix=""),
        *((name, partial(_package, name, extra)) for name, extra in _PACKAGES.items()),
        _part("package", "onnxruntime", require_onnxruntime, fix=""),
        _part("runner", "eager", _eager, fix="pip install gmmvit-deploy"),
        _part("runner", "onnxruntime", _onnxruntime, fix=""),
        *(_part("runner", name, partial(_on_gpu, provider), fix="") for name, provider in _GPU.items()),
        _part("runner", "openvino", _openvino, fix=_install("openvino")),
        _part("kernel", "openvino+kernels", _kernels, fix=""),  # errors about packages state what to type
        _part("runner", "triton-grpc", lambda: _client("grpc"), fix=_install("client")),
        _part("runner", "triton-http", lambda: _client("http"), fix=_install("client")),
        *(_part("engine", name, partial(_builds, name), fix=_install(name)) for name in FLAVORS),
        _part("server", "tritonserver", _server, fix=_install("serve")),
        _part("server", "haproxy", _haproxy, fix=INSTALL_HAPROXY),
    ]


def _part(kind: Kind, name: str, attempt: Callable[[], str], *, fix: str) -> tuple[str, Callable[[], Check]]:
    return name, partial(_tried, kind, name, attempt, fix=fix)


def examine_bundle(bundle: Bundle, server: ServerTensorRT | None, *, on_progress: OnProgress = ignore) -> list[Check]:
    """Check each graph and each engine of a bundle; without a server, also measure each precision's speed on this CPU.

    Every graph and engine must be complete and unchanged. For an engine, the result also states whether the engine runs
    on this machine. Another check for each engine tests whether the server can load the engine.
    server: the TensorRT of the server; None skips the checks for a server.
    """
    held = [(precision, form) for precision in SPECS for form in forms_in(bundle, precision)]
    parts = [
        _part("graph", graph_file(precision, form), partial(_graph, bundle, precision, form), fix="")
        for precision, form in held
    ]
    parts += [
        _part("speed", Path(graph_file(precision, form)).stem, partial(_speed, bundle, precision, form), fix="")
        for precision, form in held
        if precision != "fp32" and bool(form) == bool(SPECS[precision].forms) and server is None
    ]
    folders = sorted(path.parent for path in (bundle.path / "engines").glob(f"*/{CARD_FILE}"))
    for folder in folders:
        parts.append(_part("engine", folder.name, partial(_engine_here, bundle, folder), fix=""))
        if server is not None:
            parts.append(_part("server", folder.name, partial(_engine_there, folder, server), fix=""))
    checks = _examined(parts, on_progress)
    if server is not None and not folders:
        hint = f"gmmvit build {bundle.path} --flavor tensorrt on a GPU machine that has TensorRT {server.version}"
        checks.append(Check(kind="server", name=server.name, works=False, detail="the bundle has no engine", fix=hint))
    return checks


def _speed(bundle: Bundle, precision: Precision, form: Form) -> str:
    """Measure how fast this CPU runs a precision.  An older measurement in the record may be of another machine."""
    speed = measured_speed(bundle, open_variant(bundle, precision, form))["times_as_fast"]
    if not speed:
        return f"not compared with float32, because no runner computes in {precision} on this CPU"
    return "; ".join(f"{runner}: {speed_in_words(ratios)}" for runner, ratios in speed.items())


def _graph(bundle: Bundle, precision: Precision, form: Form) -> str:
    graph = open_variant(bundle, precision, form)
    whole = "; ".join((f"complete and unchanged, SHA-256 {graph.sha256[:12]}…", *_judged(bundle, graph.sha256)))
    if precision not in ONNXRUNTIME_PRECISIONS or form:
        return whole
    return (
        f"{whole}; the ONNX Runtime backend of Triton {OLDEST_RELEASE} or newer loads it, with --runner "
        f"onnxruntime-cuda {OLDEST_CUDA_RELEASE} or newer"
    )


def _judged(bundle: Bundle, graph_sha256: str) -> Iterator[str]:
    """Yield what images showed of a graph when ``gmmvit optimize`` judged it on this kind of machine."""
    choices, _ = read_choices(bundle.path)
    machine = this_machine()
    for choice in choices:
        gate = choice.gate
        if gate is None or choice.machine != machine:
            continue
        for one in choice.candidates:
            if one.graph_sha256 == graph_sha256 and one.judged:
                yield (
                    f"{one.runner}: {gate.kind} {one.judged.value:.4f} ({one.judged.low:.4f} to "
                    f"{one.judged.high:.4f}) on {choice.images}, gate {gate.min_share:g}"
                )


def _engine_here(bundle: Bundle, folder: Path) -> str:
    engine = open_engine(folder)
    require_bundle(bundle, engine)
    card = engine.card
    runs = _runs_here(card)
    fused = sum(proof.fused for proof in card.attentions)
    return f"complete and unchanged; {fused} of {len(card.attentions)} attentions are fused to a single kernel; {runs}"


def _runs_here(card: EngineCard) -> str:
    gpu = visible_gpu()
    if gpu is None:
        return "this machine has no GPU to run the engine"
    return runs_on(card, gpu) or loads_in(card, find_flavor(card.flavor).version) or f"runs on {gpu.name}"


def _engine_there(folder: Path, server: ServerTensorRT) -> str:
    card = open_engine(folder).card
    if reason := loads_on(card, server):
        raise GmmvitError(reason)
    place = card.target["gpu"] or ", ".join(card.target["capabilities"])
    return f"{server.name} has TensorRT {server.version}, which can load the engine, on {place}"


def _install(extra: str) -> str:
    return f"pip install 'gmmvit-deploy[{extra}]'"


def _tried(kind: Kind, name: str, attempt: Callable[[], str], *, fix: str) -> Check:
    try:
        return Check(kind=kind, name=name, works=True, detail=attempt())
    except GmmvitError as exc:
        own_hint = exc.hint if exc.hint != exc.default_hint else fix
        return Check(kind=kind, name=name, works=False, detail=str(exc), fix=own_hint)
    # A broken installation can raise any exception. Every exception is therefore reported.
    except Exception as exc:
        return Check(kind=kind, name=name, works=False, detail=f"{type(exc).__name__}: {exc}"[:200], fix=fix)


def _package(name: str, extra: str) -> Check:
    fix = _install(extra) if extra else "pip install gmmvit-deploy"
    try:
        return Check(kind="package", name=name, works=True, detail=version(name))
    except PackageNotFoundError:
        return Check(kind="package", name=name, works=False, detail="not installed", fix=fix)


def _gpu() -> str:
    gpu = visible_gpu()
    if gpu is None:
        raise GmmvitError("no GPU is visible (nvidia-smi does not answer); only running an engine needs a GPU")
    return f"{gpu.name}, compute capability {gpu.capability}, driver {gpu.driver}"


def _eager() -> str:
    torch = require("torch", package="torch", extra="cpu")
    product = torch.ones(2, 2) @ torch.ones(2, 2)
    if float(product.sum()) != 8.0:
        raise GmmvitError("torch computes a wrong matrix product on this machine")
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads"


def _onnxruntime() -> str:
    import numpy as np

    onnxruntime = import_onnxruntime()
    session = onnxruntime.InferenceSession(_gelu(), providers=[CPU])
    (answer,) = session.run(None, {"x": np.zeros(1, np.float32)})
    if answer[0] != 0:
        raise GmmvitError("ONNX Runtime computes a wrong result on this machine")
    return f"onnxruntime {onnxruntime.__version__}, runs graphs of opset 20"


def _on_gpu(provider: str) -> str:
    """Run a graph on the provider of ONNX Runtime, and return a description of the provider."""
    gpu = visible_gpu()
    if gpu is None:
        raise GmmvitError("no GPU is visible (nvidia-smi does not answer)")
    onnxruntime = require_provider(provider)
    session_on_providers(_gelu(), "a test graph", {provider: {}, CUDA: {}})
    return f"{provider} of onnxruntime-gpu {onnxruntime.__version__}, runs a test graph on {gpu.name}"


def _gelu() -> bytes:
    from onnx.parser import parse_model

    graph = parse_model('<ir_version: 9, opset_import: ["": 20]> probe (float[1] x) => (float[1] y) { y = Gelu(x) }')
    return graph.SerializeToString()  # type: ignore[no-any-return]


def _openvino() -> str:
    openvino = require("openvino", package="openvino", extra="openvino")
    capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    computed = [precision for precision in OPENVINO_PRECISIONS if SPECS[precision].openvino_name in capabilities]
    which = "gmmvit doctor BUNDLE measures which of them are fast"
    return f"openvino {openvino.__version__}; computes in {', '.join(computed)}; {which}"


def _kernels() -> str:
    """Load this project's CPU kernels, compile them if need be, and return how they compute."""
    path, why = openvino_library()
    if path is None:
        raise GmmvitError(
            why, hint="install g++, or set the variable CXX to another compiler" if "compiler" in why else ""
        )
    kernels, how = our_kernels("bf16")
    if kernels is None:
        raise GmmvitError(how)
    return f"attention up to {how} with {kernels.instruction_set}; {path}"


def _client(protocol: str) -> str:
    require(f"tritonclient.{protocol}", package="tritonclient", extra="client")
    return f"tritonclient {version('tritonclient')}; needs a running server"


def _builds(name: str) -> str:
    """Build a small engine with the flavor ``name``, and return a description of the result."""
    flavor = find_flavor(name)
    gpu = visible_gpu()
    capabilities = () if gpu or not flavor.capabilities else (_BUILT_FOR,)
    options = BuildOptions(precision="fp16", capabilities=capabilities)
    refuse(options, flavor)
    with temporary_folder("doctor") as temporary:
        onnx, folder = temporary / "probe.onnx", temporary / "engine"
        onnx.write_bytes(_probe())
        folder.mkdir()
        built = build_plan(
            onnx, options, (Profile(minimum=1, optimum=1, maximum=2),), flavor, tensor="x", shape=(8,), folder=folder
        )
        size = built.path.stat().st_size
    place = f"on {gpu.name}" if gpu else f"without a GPU, for {', '.join(flavor.capabilities)}"
    return f"{flavor.version}; built a test engine of {size:,} bytes {place}"


def _probe() -> bytes:
    import numpy as np
    from onnx import numpy_helper
    from onnx.parser import parse_model

    graph = parse_model(
        '<ir_version: 9, opset_import: ["": 20]> '
        "probe (float16[batch, 8] x) => (float16[batch, 8] y) { y = MatMul(x, w) }"
    )
    graph.graph.initializer.append(numpy_helper.from_array(np.eye(8, dtype=np.float16), "w"))
    return graph.SerializeToString()  # type: ignore[no-any-return]


def _server() -> str:
    install = find_server()
    version = _start_once(install)
    origin = f"of the {PACKAGE} wheel" if install.kind == "wheel" else "installed on this machine"
    backends = ", ".join(install.backend_names) or "none"
    return f"{install.binary}, {origin}; backends: {backends}; {triton_in_words(version)}"


def _haproxy() -> str:
    program = find_haproxy()
    return f"HAProxy {haproxy_version(program)} ({program}), for gmmvit serve --gateway"


def _start_once(install: ServerInstall) -> str:
    """Start the server, which loads every linked library, and return its version.  Errors: GmmvitError.

    Its model repository does not exist, so it says what it is, and ends.
    """
    environment = {**os.environ, **install.environment}
    try:
        answer = subprocess.run(
            [str(install.binary), "--model-repository=/nonexistent"],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
        )
    except (OSError, subprocess.SubprocessError) as exc:
        raise GmmvitError(f"{install.binary} does not start: {exc}") from exc
    version = re.search(r"server_version\s*\|\s*(\S+)", answer.stdout + answer.stderr)
    if version is None:
        raise GmmvitError(f"{install.binary} does not start: {(answer.stderr or answer.stdout).strip()[:160]}")
    return version[1]
