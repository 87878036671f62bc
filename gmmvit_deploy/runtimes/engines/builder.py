"""Build a plan, the file that TensorRT loads, from an ONNX file.

The builder runs in a separate process, which reports progress. This process can stop the builder, and continues when
the builder crashes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gmmvit_deploy.errors import EngineError
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.runtimes.engines.flavors import MODULES, Flavor
from gmmvit_deploy.runtimes.engines.options import BuildOptions, Profile

_HERE = Path(__file__).parent
_LAUNCHER = Path(__file__).parents[2] / "files" / "_launch.py"
_STOP_TIMEOUT_S = 20.0
_KILLED_FOR_MEMORY = (-signal.SIGKILL, -signal.SIGABRT)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltPlan:
    """A finished plan.  seconds: the duration of the build.

    layers: target (compute capability; empty for the GPU of the build) → the text in which TensorRT lists the layers.
    """

    path: Path
    layers: dict[str, str]
    seconds: float
    log: Path


def build_plan(
    onnx: Path,
    options: BuildOptions,
    profiles: tuple[Profile, ...],
    flavor: Flavor,
    *,
    tensor: str,
    shape: tuple[int, ...],
    folder: Path,
    on_progress: OnProgress = ignore,
) -> BuiltPlan:
    """Build a plan into ``folder``, which must be empty.  On Ctrl-C, the builder is stopped first.

    tensor, shape: of the graph's input, without the batch.
    Errors: EngineError when the builder refuses the graph, fails, is killed, or is stopped.
    """
    request = {
        "library": MODULES[flavor.name],
        "onnx": str(onnx.absolute()),
        "capabilities": list(options.capabilities),
        "profiles": [(profile.minimum, profile.optimum, profile.maximum) for profile in profiles],
        "tensor": tensor,
        "shape": list(shape),
        "timing_cache_out": str(folder / "timing.cache"),
        **options.flags(),
    }
    (folder / "request.json").write_text(json.dumps(request))
    status = _run(folder, on_progress)
    result_path = folder / "result.json"
    if status != 0 or not result_path.exists():
        raise EngineError(_how_it_died(status, folder, flavor))
    result: dict[str, Any] = json.loads(result_path.read_text())
    if result["stopped"]:
        raise EngineError("the build was stopped")
    if result["errors"]:
        raise EngineError(f"{flavor.name} {flavor.version} failed to build the engine: {_short(result['errors'])}")
    layers = {
        target: (folder / f"layers.{number}.txt").read_text(encoding="utf-8")
        for number, target in enumerate(result["listed"])
    }
    return BuiltPlan(
        path=folder / "model.plan", layers=layers, seconds=float(result["seconds"]), log=folder / "build.log"
    )


def _run(folder: Path, on_progress: OnProgress) -> int:
    command = [
        sys.executable,
        str(_LAUNCHER),
        str(os.getpid()),
        sys.executable,
        str(_HERE / "_build.py"),
        str(folder / "request.json"),
    ]
    with (folder / "stderr.txt").open("wb") as errors:
        # The builder runs in a new session, so Ctrl-C reaches only this process, which then stops the builder.
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        try:
            _follow(child, on_progress)
            return child.wait()
        except BaseException:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_STOP_TIMEOUT_S)
            child.kill()
            child.wait()
            raise


def _follow(child: subprocess.Popen[bytes], on_progress: OnProgress) -> None:
    phase, done, steps = "starting", 0, 1
    for line in child.stdout or ():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # TensorRT itself may print to stdout
        phase = event.get("phase", phase)
        if event.get("outermost"):
            done, steps = 0, event["steps"]
        if "done" in event:
            done = event["done"]
        on_progress(Progress(phase, done, steps))


def _how_it_died(status: int, folder: Path, flavor: Flavor) -> str:
    lines = (folder / "stderr.txt").read_text(errors="replace").strip().splitlines()
    last = f"; its last output: {lines[-1]}" if lines else ""
    if "MemoryError" in last or "bad_alloc" in last:
        return f"the {flavor.name} builder ran out of memory{last}"
    if status in _KILLED_FOR_MEMORY:
        name = signal.Signals(-status).name
        return f"the {flavor.name} builder was killed by {name}, which most often means that memory ran out{last}"
    if status < 0:
        return f"the {flavor.name} builder was killed by {signal.Signals(-status).name}{last}"
    return f"the {flavor.name} builder ended with status {status}{last}"


def _short(errors: list[str]) -> str:
    """Join the first two error messages of the builder, without the paths of TensorRT's source files."""
    cut = [error.split(". In ")[0].split(" In ")[0].strip() for error in errors[:2]]
    return "; ".join(cut)
