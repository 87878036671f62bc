"""Precisions of timm's models: the logits stay within the limits of the precision, and what the policy refuses."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.exporting.graphs_of_precisions import graph_from_model
from gmmvit_deploy.graphs.roles import attentions_of, roles_of
from gmmvit_deploy.graphs.wiring import input_of
from gmmvit_deploy.inference.precision import CALIBRATED, Precision
from tests.models.families.small_models import random_images, require_logits_of_precision
from tests.timm_graphs import timm_model

INSIDE = ("registers", "rmsnorm", "swin_padded", "beit", "eva02", "cait", "mobilevit")
"""Test models whose operators the policy knows."""
pytestmark = pytest.mark.integration


def graph_in(name: str, precision: Precision) -> ir.Model:
    model = timm_model(name)
    calibration = [random_images(model.spec)] if precision in CALIBRATED else None
    graph = graph_from_model(
        model, precision, preprocessing=None, max_batch=8, calibration=calibration, what="the bundle"
    ).model
    onnx.checker.check_model(ir.to_proto(graph), full_check=True)
    return graph


def error_share(graph: ir.Model, name: str, precision: Precision) -> float:
    model = timm_model(name)
    return require_logits_of_precision(graph, precision, model, random_images(model.spec))


@pytest.mark.first(1)
@pytest.mark.parametrize(("name", "precision"), [*((name, "fp16") for name in INSIDE), ("registers", "bf16")])
def test_half_precision_stays_within_the_limits(name: str, precision: Precision) -> None:
    assert error_share(graph_in(name, precision), name, precision) > 0


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "precision"), [("clip", "int8"), ("rmsnorm", "int8"), ("swin_padded", "int8"), ("cait", "fp8")]
)
def test_projections_are_quantised(name: str, precision: Precision) -> None:
    graph = graph_in(name, precision)
    quantised = {value.name for node in graph.graph for value in node.outputs if node.op_type == "DequantizeLinear"}
    for node, role in roles_of(graph.graph).items():
        if node.op_type in ("Conv", "Gemm", "MatMul"):
            reads = sum(input_of(node, index).name.removesuffix(".float16") in quantised for index in (0, 1))
            assert reads == (2 if role == "projection" else 0), node.name
    assert 0 < error_share(graph, name, precision) < 0.1


@pytest.mark.nightly
def test_an_operator_outside_the_policy_leaves_fp32_only() -> None:
    for precision in ("fp16", "int8"):
        with pytest.raises(ExportError, match=r"the bundle: .* node network\.maxpool/MaxPool has none"):
            graph_in("resnet", precision)
    error_share(graph_in("resnet", "fp32"), "resnet", "fp32")


@pytest.mark.nightly
def test_attentions_that_are_not_answered_are_inferred() -> None:
    """CaiT's talking heads do not call the fused attention function; its class attention does."""
    attentions = {attention.name: attention for attention in attentions_of(graph_in("cait", "fp16").graph)}
    assert list(attentions) == [
        "network.blocks.0.attn",
        "network.blocks.1.attn",
        "network.blocks_token_only.0.attn.attention",
    ]
    assert all(attention.known for attention in attentions.values())
    assert [attention.mixes_heads for attention in attentions.values()] == [True, True, False]
