"""Check that a quantised graph was calibrated on images similar to the data.

Calibration gives each quantised activation a bound: the magnitude that becomes the largest quantised value.

    ratio of an activation = error with the calibrated bound / error with a bound computed from the data

Both errors of the ratio are measured on the data. Calibration on other images of the same kind gives a ratio near 1:
at most 1.9 with eight images of digits, and 1.0 with five hundred images of digits. Calibration on noise gives a ratio
of 5 to 11 for the demo's model. Accuracy alone may not show a wrong calibration, because a robust model tolerates some
error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from numpy.typing import NDArray

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.export.variants import graph_before_quantization

from gmmvit_deploy.parity._verdict import Check, skipped_check
from gmmvit_deploy.precision import Precision
from gmmvit_deploy.runtimes.programs.onnxruntime import calibrate

__all__ = ["check_calibration"]

MOST_EXCESS = 3.0
"""Largest ratio allowed: between 1.9, measured for a correct calibration, and 5, measured for a wrong calibration."""
_MOST_NAMED = 3


def check_calibration(bundle: Bundle, precision: Precision, batches: Iterable[NDArray[Any]], *, for_cpu: bool) -> Check:
    """Compare the calibrated bounds with bounds computed from the data.

    batches: the data: real images (B, …) in the form of the graph's input.
    for_cpu: True for the graph that CPUs run.
    Errors: InputError when there are no batches.
    """
    variant = open_variant(bundle, precision, for_cpu=for_cpu)
    record = variant.record
    if record is None or record.calibration is None:
        return skipped_check("calibration", f"{precision} needs no calibration")
    calibration = record.calibration
    proto = graph_before_quantization(bundle, record, for_cpu=variant.for_cpu)
    histograms = calibrate(proto, batches)
    made_by = {tensor: node.name for node in proto.graph.node for tensor in node.output}
    excess = {
        made_by[tensor]: value for tensor, value in excess_errors(histograms, calibration["bounds"], precision).items()
    }
    worst = sorted(excess, key=lambda name: -excess[name])
    beyond = [name for name in worst if excess[name] > MOST_EXCESS]
    source = f"{calibration['images']} images of {calibration['source']}"
    reasons = [
        f"{name}: its bound was calibrated on {source}, and its error is {excess[name]:.1f} times the error of a bound "
        f"from this data; expected at most {MOST_EXCESS:g} times"
        for name in beyond[:_MOST_NAMED]
    ]
    if len(beyond) > _MOST_NAMED:
        reasons.append(f"and {len(beyond) - _MOST_NAMED} more of {len(excess)} activations")
    return Check(
        name="calibration",
        verdict="failed" if beyond else "passed",
        summary=f"calibrated on {source}: in {len(excess)} activations, errors are at most {excess[worst[0]]:.2g} "
        "times the errors with bounds from this data",
        reasons=tuple(reasons),
        details={"source": calibration["source"], "sha256": calibration["sha256"], "excess": excess},
    )
