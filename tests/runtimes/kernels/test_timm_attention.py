"""Attentions of timm's models: which of them this project's kernel computes, and the logits through the kernel."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import onnx_ir as ir
import openvino
import pytest

from gmmvit_deploy.exporting.onnx_from_model import onnx_from_model
from gmmvit_deploy.graphs.roles import attentions_of
from gmmvit_deploy.inference.matcher import MatchedAttention, Refusal, attentions_in
from gmmvit_deploy.inference.openvino_program import OpenVinoProgram
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.runtimes.programs.openvino import our_kernels
from tests.runtimes.kernels.test_masked_attention import needs_kernel
from tests.timm_graphs import timm_model

MIXED = "transpose stands before its softmax, expected Q Kᵀ, a mask, a bias or head mixing"
EXPECTED: dict[str, tuple[int, list[str]]] = {
    **dict.fromkeys(("vit", "beit", "relpos", "pit", "swin_padded", "registers", "eva02", "rope"), (2, [])),
    "swin": (3, []),
    "map_pooling": (3, []),
    "cait": (1, [MIXED, MIXED]),
}
"""Test model → (attentions that the kernel computes, the reasons of the others)."""
pytestmark = pytest.mark.integration


@functools.cache
def graph_of(name: str) -> ir.Model:
    return onnx_from_model(fold(timm_model(name)).model, preprocessing=None, max_batch=8)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", EXPECTED)
def test_what_the_kernel_takes(name: str) -> None:
    graph = graph_of(name)
    matches = attentions_in(openvino.Core().read_model(ir.to_proto(graph).SerializeToString()))
    taken = [match for match in matches if isinstance(match, MatchedAttention)]
    assert (len(taken), [match.reason for match in matches if isinstance(match, Refusal)]) == EXPECTED[name]
    assert [match.name for match in matches] == [attention.name for attention in attentions_of(graph.graph)]


@pytest.mark.first(1)
@needs_kernel
@pytest.mark.parametrize("name", [name for name, (taken, _) in EXPECTED.items() if taken])
def test_openvino_with_the_kernel_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    ir.save(graph_of(name), path)
    kernels, why = our_kernels("fp32")
    own = OpenVinoProgram(str(path), hint="f32", kernels=kernels)
    plain = OpenVinoProgram(str(path), hint="f32")
    assert own.fused_attentions == EXPECTED[name][0], why
    shape = graph_of(name).graph.inputs[0].shape[1:]
    images = np.random.default_rng(5).standard_normal((5, *shape), dtype=np.float32)
    for batch in (1, 5):
        np.testing.assert_allclose(own.run(images[:batch]), plain.run(images[:batch]), atol=2e-5)
