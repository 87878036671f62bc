"""Check that a quantised graph loses on the data no more than it lost on its calibration images.

The graph runs on the data with every rounding (`emulated_logits`), so the runtime has no part in the result. Its loss
is the signal-to-noise ratio of its logits against PyTorch's float64 logits, in dB (`tolerances.signal_to_noise_db`).
`gmmvit convert` recorded this ratio for calibration images that did not set the ranges. On the data, the ratio may be
lower by `MOST_LOST_DB`: differences of images explain some dB, as with few images. A larger loss means that the graph
was calibrated on other images than these, or that its constants are wrong. For fp8, no ratio is recorded.

Whatever the loss, no activation may saturate for more than `MOST_SATURATED` of its values on the data, and the
constants must fit the trained weights (`graphs.quantized_faults`), which names what is wrong.
"""

from __future__ import annotations

from typing import Any

import onnx
from numpy.typing import NDArray

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.export.graphs_of_precisions import graph_before_quantization
from gmmvit_deploy.graphs.quantized_faults import quantized_faults
from gmmvit_deploy.parity._verdict import Check, skipped_check
from gmmvit_deploy.precision import Precision
from gmmvit_deploy.runtimes.programs.emulated_precision import emulated_logits, saturated_shares
from gmmvit_deploy.tolerances import signal_to_noise_db

__all__ = ["check_calibration"]

MOST_LOST_DB = 6.0
MOST_SATURATED = 0.01
_MOST_NAMED = 3


def check_calibration(
    bundle: Bundle, precision: Precision, inputs: NDArray[Any], exact: NDArray[Any], *, for_cpu: bool
) -> Check:
    """Compare the loss of a quantised graph on the data with its loss on calibration images.

    inputs: the data, real images (B, …) in the form of the graph's input.  exact: (B, C), PyTorch's float64 logits.
    for_cpu: True for the graph that CPUs run.
    """
    variant = open_variant(bundle, precision, for_cpu=for_cpu)
    record = variant.record
    if record is None or record.calibration is None:
        return skipped_check("calibration", f"{precision} needs no calibration")
    calibration = record.calibration
    source = f"{calibration['images']} images of {calibration['source']}"
    quantized = onnx.load(variant.path)
    db = signal_to_noise_db(emulated_logits(quantized, inputs, name=variant.path.name), exact)
    recorded = calibration["recipe"]["db"] if "recipe" in calibration else None
    plain = graph_before_quantization(bundle, record, for_cpu=variant.for_cpu)
    shares = saturated_shares(quantized, inputs, name=variant.path.name)
    worst = sorted(shares, key=lambda name: -shares[name])
    saturated = [name for name in worst if shares[name] > MOST_SATURATED]
    float32 = calibration["recipe"]["float32"] if "recipe" in calibration else ()
    reasons = list(quantized_faults(quantized, plain, calibration["ranges"], float32)[:_MOST_NAMED])
    reasons += [
        f"{name}: {shares[name]:.1%} of its values saturate on this data; its range was calibrated on {source}"
        for name in saturated[:_MOST_NAMED]
    ]
    if len(saturated) > _MOST_NAMED:
        reasons.append(f"and {len(saturated) - _MOST_NAMED} more of {len(shares)} activations")
    if recorded is not None and db < recorded - MOST_LOST_DB:
        reasons.insert(
            0,
            f"the graph's logits have {db:.1f} dB on this data, and {recorded:.1f} dB on images of its calibration "
            f"({source}); expected at most {MOST_LOST_DB:g} dB less",
        )
    before = "" if recorded is None else f", {recorded:.1f} dB on images of its calibration"
    return Check(
        name="calibration",
        verdict="failed" if reasons else "passed",
        summary=f"calibrated on {source}: {db:.1f} dB on this data{before}; "
        f"at most {shares[worst[0]]:.2%} of an activation saturates",
        reasons=tuple(reasons),
        details={
            "source": calibration["source"],
            "sha256": calibration["sha256"],
            "db": db,
            "recorded_db": recorded,
            "saturated": shares,
            **{name: calibration[name] for name in ("gate", "gate_images", "curve") if name in calibration},
        },
    )
