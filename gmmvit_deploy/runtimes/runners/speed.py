"""Measure whether this machine's CPU computes a precision of a bundle faster than float32.

No flag of the processor says so: CPUs with instructions for bf16 can compute a network more slowly in bf16 than in
float32. The two networks take turns, so that both slow down alike if the machine does, and the result is the median of
the ratios of their times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.errors import MissingDependencyError, RunnerUnavailableError
from gmmvit_deploy.runtimes.programs.cores import cores, cpu_name
from gmmvit_deploy.runtimes.programs.memory import release_memory
from gmmvit_deploy.runtimes.programs.openvino import why_no_openvino
from gmmvit_deploy.runtimes.runners.open import proof_programs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gmmvit_deploy.bundle.artifacts import Bundle
    from gmmvit_deploy.bundle.variants import Variant
    from gmmvit_deploy.runtimes.runners.runner import Runner

__all__ = ["measured_speed", "speed_in_words"]

_BATCHES = (1, 16)
_RUNTIMES = (("openvino+kernels", "openvino"), ("onnxruntime",))
"""The runners of each runtime; the first that can run here would serve the network."""
_SECONDS = 1.5  # for a runtime and a batch
_LEAST_ROUNDS = 3
_TURN_S = 0.03
"""Each turn runs untimed for as long, while threads of the other network spin, and then is timed for as long."""


def measured_speed(bundle: Bundle, variant: Variant) -> dict[str, Any]:
    """Return how many times as fast as float32 this machine's CPU runs a graph, for `VariantRecord.speed`.

    variant: a graph of the bundle for CPUs, not in fp32.
    Returns ``cpu``, the processor; ``cores``, their number; and ``times_as_fast``: runner → batch → ratio, without the
    runtimes that do not compute in this precision here.
    Errors: BundleError when a runtime cannot load a graph.
    """
    plain, narrow = proof_programs(bundle, open_variant(bundle, "fp32")), proof_programs(bundle, variant)
    inputs, _ = bundle.golden_rows()
    batches = sorted({min(batch, bundle.manifest.max_batch) for batch in _BATCHES})
    ratios = {}
    for names in _RUNTIMES:
        if names[-1] == "openvino" and why_no_openvino(variant.precision, dynamic=variant.dynamic):
            continue
        runner, base = _first(narrow, names), _first(plain, names)
        if runner is not None and base is not None:
            sized = {size: np.resize(inputs, (size, *inputs.shape[1:])) for size in batches}
            ratios[runner.name] = {str(size): round(_ratio(base, runner, rows), 3) for size, rows in sized.items()}
        del runner, base
        release_memory()
    return {"cpu": cpu_name(), "cores": cores(), "times_as_fast": ratios}


def speed_in_words(times_as_fast: Mapping[str, float]) -> str:
    """Return a sentence about a runner.  times_as_fast: batch → how many times as fast as in float32."""
    ratios, batches = " / ".join(f"{ratio:.2f}" for ratio in times_as_fast.values()), " / ".join(times_as_fast)
    slower = [batch for batch, ratio in times_as_fast.items() if round(ratio, 2) < 1]
    advice = ""
    if slower:
        advice = ": slower, so do not use it here"
        if len(slower) < len(times_as_fast):
            advice = f": slower at batch {', '.join(slower)}"
    return f"{ratios} times as fast as float32 on this CPU (batch {batches}){advice}"


def _first(programs: Mapping[str, Callable[[], Runner]], names: tuple[str, ...]) -> Runner | None:
    for name in names:
        try:
            return programs[name]()
        except (RunnerUnavailableError, MissingDependencyError):
            continue
    return None


def _ratio(base: Runner, runner: Runner, batch: NDArray[Any]) -> float:
    """Return the median of the time of ``base`` over that of ``runner``."""
    base.run(batch), runner.run(batch)  # OpenVINO compiles the graph for this size
    ratios: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(ratios) < _LEAST_ROUNDS or time.perf_counter() < end:
        order = (base, runner) if len(ratios) % 2 else (runner, base)
        seconds = {one.label: _turn(one, batch) for one in order}
        ratios.append(seconds[base.label] / seconds[runner.label])
    return float(np.median(ratios))


def _turn(runner: Runner, batch: NDArray[Any]) -> float:
    """Return the seconds of a run."""
    _repeated(runner, batch)
    return _repeated(runner, batch)


def _repeated(runner: Runner, batch: NDArray[Any]) -> float:
    start, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - start < _TURN_S:
        runner.run(batch)
        count += 1
    return (time.perf_counter() - start) / count
