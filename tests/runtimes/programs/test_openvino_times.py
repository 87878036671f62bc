"""The time of a graph in OpenVINO, and what int8 gains in each of its projections."""

from __future__ import annotations

import onnx_ir as ir

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.graphs.quantize import activations_of, projections_of, quantize_graph
from gmmvit_deploy.runtimes.programs.openvino_times import projection_gains, relative_time


def test_each_product_is_found_in_the_profile(bundle: Bundle) -> None:
    plain = ir.load(bundle.onnx_path)
    quantized = quantize_graph(plain, "int8", dict.fromkeys(activations_of(plain.graph), (-8.0, 8.0)))
    batch, projections = bundle.golden_set().inputs[:2], projections_of(plain.graph)
    gains = projection_gains(plain, quantized, projections, batch)
    assert list(gains) == [node.name for node in projections]
    assert any(gains.values())
    assert gains["blocks.0.mlp.0/MatMul"] == gains["blocks.1.mlp.0/MatMul"]  # of the same shape
    assert relative_time(plain, quantized, batch) > 0
