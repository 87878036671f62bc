"""Measure whether this machine's CPU computes a precision of a bundle faster than float32.

No flag of the processor says so: CPUs with instructions for bf16 can compute a network more slowly in bf16 than in
float32. The graphs of both precisions are timed in turn (`measure.turns`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.errors import MissingDependencyError, RunnerUnavailableError
from gmmvit_deploy.inference.cores import cores, cpu_name
from gmmvit_deploy.measure.turns import time_ratio
from gmmvit_deploy.runtimes.programs.memory import release_memory
from gmmvit_deploy.runtimes.programs.openvino import why_no_openvino
from gmmvit_deploy.runtimes.runners.open import proof_programs

if TYPE_CHECKING:
    from gmmvit_deploy.bundle.artifacts import Bundle
    from gmmvit_deploy.bundle.variants import Variant
    from gmmvit_deploy.runtimes.runners.runner import Runner

_BATCHES = (1, 16)
_RUNTIMES = (("openvino+kernels", "openvino"), ("onnxruntime",))
"""The runners of each runtime; the first that can run here would serve the network."""


def measured_speed(bundle: Bundle, variant: Variant) -> dict[str, Any]:
    """Return how many times as fast as float32 this machine's CPU runs a graph, for `VariantRecord.speed`.

    variant: a graph of the bundle for CPUs, not in fp32, with its record. Wrong runners are not timed.
    Returns ``cpu``, the processor; ``cores``, their number; and ``times_as_fast``: runner → batch → the ratio and both
    ends of its interval (`measure.statistics`), without the runtimes that do not compute in this precision here.
    Errors: BundleError when a runtime cannot load a graph.
    """
    plain, narrow = proof_programs(bundle, open_variant(bundle, "fp32")), proof_programs(bundle, variant)
    proofs = variant.record.programs if variant.record is not None else {}
    for name in bundle.manifest.wrong_runners:
        del plain[name]
    for name in [name for name, proof in proofs.items() if proof.get("wrong")]:
        del narrow[name]
    inputs, _ = bundle.golden_rows()
    batches = sorted({min(batch, bundle.manifest.max_batch) for batch in _BATCHES})
    ratios: dict[str, dict[str, list[float]]] = {}
    for names in _RUNTIMES:
        if names[-1] == "openvino" and why_no_openvino(variant.precision, dynamic=variant.form == "dynamic"):
            continue
        runner, base = _first(narrow, names), _first(plain, names)
        if runner is not None and base is not None:
            ratios[runner.name] = {}
            for size in batches:
                rows = np.resize(inputs, (size, *inputs.shape[1:]))
                speed = time_ratio(partial(base.run, rows), partial(runner.run, rows))
                ratios[runner.name][str(size)] = [round(end, 3) for end in astuple(speed)]
        del runner, base
        release_memory()
    return {"cpu": cpu_name(), "cores": cores(), "times_as_fast": ratios}


def speed_in_words(times_as_fast: Mapping[str, Sequence[float]]) -> str:
    """Return a sentence about a runner.

    times_as_fast: batch → how many times as fast as in float32, with both ends of the interval.
    """
    parts = []
    for batch, (ratio, low, high) in times_as_fast.items():
        advice = ": slower, so do not use it here" if high < 1 else "" if low > 1 else ": no clear difference"
        parts.append(f"batch {batch}: {ratio:.2f} ({low:.2f} to {high:.2f}) times as fast as float32{advice}")
    return "; ".join(parts)


def _first(programs: Mapping[str, Callable[[], Runner]], names: tuple[str, ...]) -> Runner | None:
    for name in names:
        if name not in programs:
            continue
        try:
            return programs[name]()
        except (RunnerUnavailableError, MissingDependencyError):
            continue
    return None
