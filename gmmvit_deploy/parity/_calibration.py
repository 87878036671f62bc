"""Check that a quantised graph is what its record describes, and loses on the data no more than at its calibration.

Nodes and constants must be those of the trained network, quantised again as the record says
(`graphs.quantized_faults`). This needs no images.

On the data, the graph ran with every rounding (`QuantisedGraph`), so the runtime has no part in the result. Its loss is
the signal-to-noise ratio of its logits against PyTorch's float64 logits, in dB (`tolerances.signal_to_noise_db`).
`gmmvit convert` recorded this ratio for calibration images that did not set the ranges. On the data, the ratio may be
lower by `_MAX_LOST_DB`: differences of images explain some dB, as with few images. A larger loss means that the graph
was calibrated on other images than these. For fp8, no ratio is recorded. Whatever the loss, no activation may saturate
for more than `_MAX_SATURATED` of its values on the data.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from gmmvit_deploy.bundle.artifacts import Bundle, tool_versions
from gmmvit_deploy.bundle.variants import how_to_convert
from gmmvit_deploy.exporting.graphs_of_precisions import quantised_again
from gmmvit_deploy.graphs.quantized_faults import form_fault, quantized_faults
from gmmvit_deploy.parity._quantised import QuantisedGraph
from gmmvit_deploy.parity._runner_check import RunnerCheck
from gmmvit_deploy.parity._stages import StagesCheck
from gmmvit_deploy.parity._verdict import Check

_MAX_LOST_DB = 6.0
_MAX_SATURATED = 0.01
_MAX_NAMED = 3
_CONVERTERS = ("gmmvit-deploy", "onnx")
_TRACERS = ("torch", "onnxscript")


class CalibrationCheck(RunnerCheck):
    name = "calibration"

    def judge(self) -> Check:
        if self.graph is None:
            return self.not_judged(f"{self.runner.precision} needs no calibration")
        if self.run.reference is None and not self.graph.record.form:
            return self.not_judged(self.run.needs_model)
        return check_calibration(self.bundle, self.graph, self.tested.check(StagesCheck).db_of_graph)


def check_calibration(bundle: Bundle, graph: QuantisedGraph, db: float | None) -> Check:
    """db: the signal-to-noise ratio of the graph's logits on the data; None without images that can judge it."""
    check, calibration = _compared_with_record(bundle, graph), graph.record.calibration
    if calibration is None or db is None:
        return check
    source = f"{calibration['images']} images of {calibration['source']}"
    recorded = calibration.get("recipe", {}).get("db")
    shares = graph.saturated()
    worst = sorted(shares, key=lambda name: -shares[name])
    saturated = [name for name in worst if shares[name] > _MAX_SATURATED]
    reasons = [
        f"{name}: {shares[name]:.1%} of its values saturate on this data; its range was calibrated on {source}"
        for name in saturated[:_MAX_NAMED]
    ]
    if len(saturated) > _MAX_NAMED:
        reasons.append(f"and {len(saturated) - _MAX_NAMED} more of {len(shares)} activations")
    if recorded is not None and db < recorded - _MAX_LOST_DB:
        reasons.insert(
            0,
            f"the graph's logits have {db:.1f} dB on this data, and {recorded:.1f} dB on images of its calibration "
            f"({source}); expected at most {_MAX_LOST_DB:g} dB less",
        )
    before = "" if recorded is None else f", {recorded:.1f} dB on images of its calibration"
    return replace(
        check,
        verdict="failed" if reasons else check.verdict,
        summary=f"{check.summary}; calibrated on {source}: {db:.1f} dB on this data{before}; "
        f"at most {max(shares.values(), default=0.0):.2%} of an activation saturates",
        reasons=(*(f"quantisation: {why}" for why in reasons), *check.reasons),
        details={
            "source": calibration["source"],
            "sha256": calibration["sha256"],
            "db": db,
            "recorded_db": recorded,
            "saturated": shares,
            **{name: calibration[name] for name in ("gate", "gate_images", "curve") if name in calibration},
        },
    )


def _compared_with_record(bundle: Bundle, graph: QuantisedGraph) -> Check:
    """Compare the graph with the trained network, quantised again; undecided if other versions made other nodes."""
    record, stored = graph.record, ir.load(graph.path)
    expected = quantised_again(bundle, record, stored)
    # The graph for CPUs is made from the bundle's float32 graph, and the other from PyTorch's model, exported again.
    made_by = _CONVERTERS if record.form else (*_CONVERTERS, *_TRACERS)
    here = tool_versions()
    changed = [name for name in made_by if here.get(name) != record.versions.get(name)]
    fault = form_fault(stored.graph, expected.graph)
    compensated = (record.calibration or {}).get("recipe", {}).get("rounding") == "compensated"
    faults = [fault] if fault else quantized_faults(stored.graph, expected.graph, compensated=compensated)[:_MAX_NAMED]
    if fault and changed:
        versions = ", ".join(f"{name} {record.versions.get(name)}, not {here.get(name)}" for name in changed)
        faults = [
            f"{fault}; {versions} made it, so {how_to_convert(bundle, record.precision, record.form)} to compare again"
        ]
    return Check(
        name="calibration",
        verdict="passed" if not faults else "undecided" if fault and changed else "failed",
        summary="the graph is not the trained network, quantised as its record says"
        if faults
        else "the graph is the trained network, quantised as its record says",
        reasons=tuple(f"quantisation: {why}" for why in faults),
    )
