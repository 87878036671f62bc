"""Check that a quantised graph loses on the data no more than it lost on its calibration images.

The graph ran on the data with every rounding (`QuantisedGraph`), so the runtime has no part in the result. Its loss is
the signal-to-noise ratio of its logits against PyTorch's float64 logits, in dB (`tolerances.signal_to_noise_db`).
`gmmvit convert` recorded this ratio for calibration images that did not set the ranges. On the data, the ratio may be
lower by `MOST_LOST_DB`: differences of images explain some dB, as with few images. A larger loss means that the graph
was calibrated on other images than these, or that its constants are wrong. For fp8, no ratio is recorded.

Whatever the loss, no activation may saturate for more than `MOST_SATURATED` of its values on the data, and the
constants must fit the trained weights (`graphs.quantized_faults`), which names what is wrong.
"""

from __future__ import annotations

import onnx

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.export.graphs_of_precisions import graph_before_quantization
from gmmvit_deploy.graphs.quantize import can_be_dynamic, projections_of
from gmmvit_deploy.graphs.quantized_faults import quantized_faults
from gmmvit_deploy.parity._quantised import QuantisedGraph
from gmmvit_deploy.parity._verdict import Check, skipped_check

__all__ = ["check_calibration", "check_dynamic_form"]

MOST_LOST_DB = 6.0
MOST_SATURATED = 0.01
_MOST_NAMED = 3


def check_dynamic_form(bundle: Bundle, graph: QuantisedGraph) -> Check:
    """Check the constants of a graph that was made without calibration images."""
    plain, quantized = onnx.load(bundle.onnx_path), onnx.load(graph.variant.path)
    projections = projections_of(plain.graph)
    dynamic = can_be_dynamic(projections)
    others = [node.name for node in projections if node.name not in dynamic]
    reasons = quantized_faults(quantized, plain, {}, float32=others, dynamic=dynamic)[:_MOST_NAMED]
    return Check(
        name="calibration",
        verdict="failed" if reasons else "passed",
        summary="no images needed: the activations are quantised while the network runs; "
        + ("a constant does not fit the trained weights" if reasons else "the constants fit the trained weights"),
        reasons=tuple(f"quantisation: {why}" for why in reasons),
    )


def check_calibration(bundle: Bundle, graph: QuantisedGraph, db: float) -> Check:
    """Compare the loss of a quantised graph on the data with its loss on calibration images.

    graph: the graph, which ran on the data.  db: the signal-to-noise ratio of its logits on the data.
    """
    variant, calibration = graph.variant, graph.calibration
    record = variant.record
    if record is None or calibration is None:
        return skipped_check("calibration", f"{variant.precision} needs no calibration")
    source = f"{calibration['images']} images of {calibration['source']}"
    recorded = calibration["recipe"]["db"] if "recipe" in calibration else None
    quantized = onnx.load(variant.path)
    plain = graph_before_quantization(bundle, record, for_cpu=variant.for_cpu)
    shares = graph.saturated()
    worst = sorted(shares, key=lambda name: -shares[name])
    saturated = [name for name in worst if shares[name] > MOST_SATURATED]
    forms = {form: calibration.get("recipe", {}).get(form, ()) for form in ("float32", "dynamic")}
    reasons = list(quantized_faults(quantized, plain, calibration["ranges"], **forms)[:_MOST_NAMED])
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
        f"at most {max(shares.values(), default=0.0):.2%} of an activation saturates",
        reasons=tuple(f"quantisation: {why}" for why in reasons),
        details={
            "source": calibration["source"],
            "sha256": calibration["sha256"],
            "db": db,
            "recorded_db": recorded,
            "saturated": shares,
            **{name: calibration[name] for name in ("gate", "gate_images", "curve") if name in calibration},
        },
    )
