"""Parity locates a fault in the inputs of our kernels in its block; the original graph file passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.parity.check import ParityOptions, check_parity
from gmmvit_deploy.parity.report import ParityReport
from gmmvit_deploy.runtimes.kernels import openvino_kernels
from gmmvit_deploy.runtimes.programs.onnxruntime import FusedGraph, fused_graph
from gmmvit_deploy.runtimes.runners import onnxruntime as runner_module
from gmmvit_deploy.runtimes.runners.open import open_runners
from tests.runtimes.kernels.test_masked_attention import needs_kernel

pytestmark = needs_kernel
SECOND = "gmmvit.1.0"
"""The prepared mask of the second attention, in the graph with our kernels."""


def wrong_entry(numbers: np.ndarray) -> np.ndarray:
    damaged = numbers.copy()
    damaged[0, np.abs(damaged[0]).argmax()] = 0
    return damaged


def heads_swapped(numbers: np.ndarray) -> np.ndarray:
    return numbers[[1, 0, *range(2, len(numbers))]]


FAULTS = {"a wrong mask entry": wrong_entry, "two heads swapped": heads_swapped}


def judged(names: list[str], bundle: Bundle) -> ParityReport:
    with open_runners(names, bundle) as runners:
        return check_parity(bundle, runners, ParityOptions(localize=True))


def assert_fault_in_block(report: ParityReport, block: str = "blocks.1") -> None:
    plain, ours = report.runners
    assert [check.verdict for check in report.checks] == ["passed", "passed"]
    assert plain.verdict == "passed", report.failures()
    assert ours.check("numeric").verdict == "failed"
    localized = ours.check("localize")
    assert localized.details["first"] == block, localized
    assert "with our kernels" in localized.details["graph"]
    assert f"{ours.runner}: localize: {block}: its output differs" in "".join(report.failures())


@pytest.mark.first(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_in_onnxruntime(fault: str, tensor_bundles: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    right = ["onnxruntime", "onnxruntime+kernels"]
    before = judged(right, tensor_bundles["vit_gmm"])
    assert before.passed, before.failures()

    def broken(path: Path) -> tuple[FusedGraph | None, str]:
        fused, why = fused_graph(path)
        assert fused is not None, why
        proto = onnx.load_from_string(fused.graph)
        (mask,) = (tensor for tensor in proto.graph.initializer if tensor.name == SECOND)
        mask.CopyFrom(numpy_helper.from_array(FAULTS[fault](numpy_helper.to_array(mask)), SECOND))
        return FusedGraph(proto.SerializeToString(), fused.library, fused.attentions), ""

    monkeypatch.setattr(runner_module, "fused_graph", broken)
    report = judged(right, tensor_bundles["vit_gmm"])
    assert_fault_in_block(report)
    hashes = [each_report.runners[1].provenance["graph SHA-256"] for each_report in (before, report)]
    assert hashes[0] != hashes[1]  # hashes of the graphs that ran, which differ
    assert before.runners[1].provenance["made from SHA-256"] == report.runners[1].provenance["made from SHA-256"]


@pytest.mark.rest
@pytest.mark.parametrize("fault", FAULTS)
def test_in_openvino(fault: str, tensor_bundles: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    right = ["openvino", "openvino+kernels"]
    before = judged(right, tensor_bundles["vit_gmm"])
    assert before.passed, before.failures()
    prepare: Callable[..., Any] = openvino_kernels.prepared_mask
    seen: list[bytes] = []

    def broken(mask: np.ndarray, arithmetic: Any) -> Any:
        """Damage the second mask only, however often it is prepared."""
        prepared = prepare(mask, arithmetic)
        if mask.tobytes() not in seen:
            seen.append(mask.tobytes())
        if seen.index(mask.tobytes()) != 1:
            return prepared
        return replace(prepared, numbers=np.ascontiguousarray(FAULTS[fault](prepared.numbers)))

    monkeypatch.setattr(openvino_kernels, "prepared_mask", broken)
    report = judged(right, tensor_bundles["vit_gmm"])
    assert_fault_in_block(report)
    hashes = [each_report.runners[1].provenance["graph SHA-256"] for each_report in (before, report)]
    assert hashes[0] != hashes[1]


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "block"),
    [("deepvit_cnn_scaled", "blocks.1"), ("rmt_tiny_like", "stages.2.blocks.0"), ("sl_cait", "class_blocks.0")],
)
def test_a_wrong_scale_of_odd_head_dims_and_of_class_attention(
    name: str, block: str, tensor_bundles: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    runners, bundle = ["onnxruntime", "onnxruntime+kernels"], tensor_bundles[name]
    before = judged(runners, bundle)
    assert before.passed, before.failures()

    def broken(path: Path) -> tuple[FusedGraph | None, str]:
        fused, why = fused_graph(path)
        assert fused is not None, why
        proto = onnx.load_from_string(fused.graph)
        nodes = [node for node in proto.graph.node if node.op_type == "MaskedAttention" and node.name.startswith(block)]
        (scale,) = (attribute for attribute in nodes[0].attribute if attribute.name == "scale")
        scale.f *= 2
        return FusedGraph(proto.SerializeToString(), fused.library, fused.attentions), ""

    monkeypatch.setattr(runner_module, "fused_graph", broken)
    assert_fault_in_block(judged(runners, bundle), block)
