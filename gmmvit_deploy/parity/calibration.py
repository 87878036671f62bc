"""Check that a quantised graph was calibrated on images like the data's.

For every quantised activation: the error that its calibrated bound gives on this data, divided by the error of the
bound that this data itself would give. Bounds from other images of the same kind give a ratio near 1 (from eight
digits at most 1.9, from five hundred 1.0); bounds from noise give 5 to 11 (on the demo's model). Accuracy alone may
not show a wrong calibration, because a robust model tolerates some error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from numpy.typing import NDArray

from gmmvit_deploy.artifacts import Bundle
from gmmvit_deploy.export.variants import graph_before_quantization
from gmmvit_deploy.graphs.calibration import excess_errors
from gmmvit_deploy.parity.verdict import Check
from gmmvit_deploy.precision import Precision
from gmmvit_deploy.runtime.graph_calibration import calibrate
from gmmvit_deploy.variants import open_variant

__all__ = ["check_calibration"]

MOST_EXCESS = 3.0
"""Largest ratio allowed: between 1.9, the worst of a correct calibration, and 5, the best of a wrong calibration."""
_MOST_NAMED = 3


def check_calibration(bundle: Bundle, precision: Precision, batches: Iterable[NDArray[Any]]) -> Check:
    """Compare the calibrated bounds with those of the data.

    batches: of real images (B, …) as the graph takes them.  Errors: InputError when there are no batches.
    """
    record = open_variant(bundle, precision).record
    calibration = record.calibration if record else None
    if record is None or calibration is None:
        why = f"{precision} is not calibrated"
        return Check(name="calibration", verdict="skipped", summary=why, reasons=(why,))
    proto = graph_before_quantization(bundle, record)
    histograms = calibrate(proto, batches)
    made_by = {tensor: node.name for node in proto.graph.node for tensor in node.output}
    excess = {
        made_by[tensor]: value for tensor, value in excess_errors(histograms, calibration["bounds"], precision).items()
    }
    worst = sorted(excess, key=lambda name: -excess[name])
    beyond = [name for name in worst if excess[name] > MOST_EXCESS]
    source = f"{calibration['images']} images of {calibration['source']}"
    reasons = [
        f"{name}: calibrated on {source}, its bound gives {excess[name]:.1f} times the error that a bound from this "
        f"data would; at most {MOST_EXCESS:g} is allowed"
        for name in beyond[:_MOST_NAMED]
    ]
    if len(beyond) > _MOST_NAMED:
        reasons.append(f"and {len(beyond) - _MOST_NAMED} of {len(excess)} activations more")
    return Check(
        name="calibration",
        verdict="failed" if beyond else "passed",
        summary=f"calibrated on {source}: errors are at most {excess[worst[0]]:.2g} times what this data would give, "
        f"in {len(excess)} activations",
        reasons=tuple(reasons),
        details={"source": calibration["source"], "sha256": calibration["sha256"], "excess": excess},
    )
