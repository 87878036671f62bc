"""Hold a runner to the reference outputs of its bundle before its first answer.

Export compares the float32 runners of its machine, and conversion those of other precisions. Another machine, another
version of a runtime and another precision are other programs, so that a runner compares itself once: with PyTorch's
outputs for an image alone before it answers an image, and for a batch before it answers a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gmmvit_deploy.bundle.variants import recorded_distances
from gmmvit_deploy.errors import RunnerUnavailableError
from gmmvit_deploy.inference.cores import cores
from gmmvit_deploy.inference.precision import QUANTIZED, Form, Precision
from gmmvit_deploy.inference.reference_outputs import wrong_in_batch
from gmmvit_deploy.tolerances import limit_from_stored

if TYPE_CHECKING:
    from gmmvit_deploy.bundle.artifacts import Bundle
    from gmmvit_deploy.models.specs import OutputName
    from gmmvit_deploy.runtimes.runners.runner import Runner


def output_limits(bundle: Bundle, precision: Precision, form: Form) -> dict[OutputName, float]:
    """Return name of an output → the largest allowed difference from the reference outputs.

    A quantised graph without a recorded distance must only give finite values.
    form: of a graph for CPUs in int8.
    """
    recorded = recorded_distances(bundle, precision, form)
    limits: dict[OutputName, float] = {}
    for number, (output, values) in enumerate(bundle.golden_rows()[1].items()):
        distance = recorded.get("features_largest_abs" if number else "largest_abs")
        if precision in QUANTIZED and distance is None:
            limits[output] = float(np.finfo(np.float32).max)
            continue
        noise = bundle.stored_noise(values, features=number > 0)
        limits[output] = limit_from_stored(noise, precision, recorded=distance).largest
    return limits


def require_right_outputs(runner: Runner, *, several: bool) -> None:
    """Compare the outputs of a runner with the reference outputs.

    several: True for a batch, False for an image alone.
    Errors: RunnerUnavailableError when an output exceeds its limit, or has another shape.  Every error of the runner.
    """
    bundle = runner.bundle
    # With fewer than two images a core, all cores share each image, as they share a single one.
    size = runner.fitting(min(max(8, 2 * cores()) if several else 1, runner.max_batch))
    inputs, expected = bundle.golden_rows()
    inputs, expected = inputs[-size:], {output: values[-size:] for output, values in expected.items()}
    limits = output_limits(bundle, runner.precision, runner.form)
    if problem := wrong_in_batch(runner.computed, inputs, expected, limits, size):
        other = "openvino" if runner.name == "onnxruntime" else "onnxruntime"
        tf32 = "set NVIDIA_TF32_OVERRIDE=0, or " if runner.settings.get("TF32", "off") != "off" else ""
        raise RunnerUnavailableError(
            f"{bundle.path}: runner {runner.label} is wrong on this machine: {problem}",
            hint=f"{tf32}type --runner with another runner, such as {other} or eager; gmmvit parity {bundle.path} "
            f"--runner {runner.label} shows all differences",
        )
