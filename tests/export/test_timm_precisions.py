"""Precisions of timm's models: the logits stay within the limits of the precision, and what the policy refuses."""

from __future__ import annotations

import copy
import functools

import numpy as np
import onnx
import pytest
import torch

from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.export.graphs_of_precisions import graph_from_model
from gmmvit_deploy.graphs.roles import attentions_of, roles_of
from gmmvit_deploy.inference.precision import QUANTIZED, Precision
from gmmvit_deploy.runtimes.programs.emulated_precision import emulated_logits
from gmmvit_deploy.tolerances import Noise, limit_from_noise
from tests.timm_graphs import timm_model

INSIDE = ("registers", "rmsnorm", "swin_padded", "beit", "eva02", "cait", "mobilevit")
"""Test models whose operators the policy knows."""
pytestmark = pytest.mark.integration


@functools.cache
def reference(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (images, float64 logits, float32 logits) of PyTorch."""
    model = timm_model(name)
    size = model.spec.image_size
    images = torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(images.double())
        return images.numpy(), exact.numpy(), model(images).numpy()


def graph_in(name: str, precision: Precision) -> onnx.ModelProto:
    calibration = [reference(name)[0]] if precision in QUANTIZED else None
    return graph_from_model(
        timm_model(name), precision, preprocessing=None, max_batch=8, calibration=calibration, what="the bundle"
    ).proto


@pytest.mark.first(1)
@pytest.mark.parametrize(("name", "precision"), [*((name, "fp16") for name in INSIDE), ("registers", "bf16")])
def test_half_precision_stays_within_the_limits(name: str, precision: Precision) -> None:
    images, exact, single = reference(name)
    difference = single - exact
    noise = Noise(
        largest=float(np.abs(difference).max()),
        rms=float(np.sqrt(np.mean(difference**2))),
        scale=float(np.abs(exact).max()),
    )
    proto = graph_in(name, precision)
    onnx.checker.check_model(proto, full_check=True)
    error = emulated_logits(proto, images, name=name) - exact
    limit = limit_from_noise(noise, precision)
    assert limit.rms is not None
    assert 0 < np.abs(error).max() <= limit.largest
    assert np.sqrt(np.mean(error**2)) <= limit.rms


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "precision"), [("clip", "int8"), ("rmsnorm", "int8"), ("swin_padded", "int8"), ("cait", "fp8")]
)
def test_projections_are_quantised(name: str, precision: Precision) -> None:
    images, exact, _ = reference(name)
    proto = graph_in(name, precision)
    onnx.checker.check_model(proto, full_check=True)
    roles = roles_of(proto.graph)
    quantised = {name for node in proto.graph.node if node.op_type == "DequantizeLinear" for name in node.output}
    for node in proto.graph.node:
        if node.op_type in ("Conv", "Gemm", "MatMul"):
            reads = sum(name.removesuffix(".float16") in quantised for name in node.input[:2])
            assert reads == (2 if roles[node.name] == "projection" else 0), node.name
    error = np.abs(emulated_logits(proto, images, name=name) - exact).max()
    assert 0 < error < 0.1 * np.abs(exact).max()


@pytest.mark.nightly
def test_an_operator_outside_the_policy_leaves_fp32_only() -> None:
    name, node = "resnet", "network.maxpool/MaxPool"
    for precision in ("fp16", "int8"):
        with pytest.raises(ExportError) as error:
            graph_in(name, precision)
        assert str(error.value) == (
            f"the bundle: {precision} needs a known role for each operator; node {node} has none; this model runs in "
            "fp32"
        )
    proto = graph_in(name, "fp32")
    images, exact, single = reference(name)
    own = np.abs(emulated_logits(proto, images, name=name) - exact).max()
    assert own <= 8 * np.abs(single - exact).max() + 2**-23 * np.abs(exact).max()


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
