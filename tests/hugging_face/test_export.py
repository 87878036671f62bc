"""Graphs of transformers' models: logits, roles, precisions, and the attentions that our CPU kernel computes."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

pytest.importorskip("transformers")

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.exporting.graphs_of_precisions import graph_from_model
from gmmvit_deploy.exporting.onnx_from_model import onnx_from_model
from gmmvit_deploy.graphs.roles import attentions_of, roles_of
from gmmvit_deploy.inference.matcher import MatchedAttention, attentions_in
from gmmvit_deploy.inference.precision import Precision
from gmmvit_deploy.models.folding.fold import FoldedModel, fold
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.runtimes.programs.emulated_precision import emulated_logits
from gmmvit_deploy.runtimes.programs.onnxruntime import program_from_onnx
from gmmvit_deploy.runtimes.programs.openvino import read_graph
from gmmvit_deploy.tolerances import Noise, limit_from_noise
from tests.exact import assert_same_logits, exact_logits
from tests.hugging_face.folders import saved

pytestmark = pytest.mark.integration

FOLDED = {
    "deit_with_teacher": {},
    "beit": {"fold_biases": 2, "merge_layer_scales": 4},
    "swin": {"fold_biases": 3, "pool_by_mean": 1},
    "dinov2_at_another_size": {"merge_layer_scales": 4, "store_positions": 1},
}
"""Test folder → the folding passes that change its model, with the number of changes."""


SHIFTED = "network.swin.encoder.layers.0.blocks.1.attention.attention"
"""The attention in shifted windows: Q, K and V are separate, and their windows are divided after the heads."""


@functools.cache
def loaded(name: str) -> Model:
    with tempfile.TemporaryDirectory() as folder:
        return load_checkpoint(saved(name, Path(folder) / name)).model


@functools.cache
def folded(name: str) -> FoldedModel:
    return fold(loaded(name))


@functools.cache
def images() -> torch.Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(3))


@functools.cache
def reference(name: str) -> tuple[np.ndarray, Noise]:
    """Return (float64 logits, noise of the float32 logits) of PyTorch."""
    exact = exact_logits(loaded(name), images())
    with torch.inference_mode():
        difference = loaded(name)(images()).numpy() - exact
    rms = float(np.sqrt(np.mean(difference**2)))
    noise = Noise(largest=float(np.abs(difference).max()), rms=rms, scale=float(np.abs(exact).max()))
    return exact, noise


@pytest.mark.first(1)
@pytest.mark.parametrize("name", FOLDED)
def test_the_folding_passes_keep_the_logits(name: str) -> None:
    assert {step: len(changed) for step, changed in folded(name).passes.items() if changed} == FOLDED[name]
    # Merged weights are rounded to float32.
    atol = 1e-6 if "merge_layer_scales" in FOLDED[name] else 1e-12
    assert_same_logits(exact_logits(folded(name).model, images()), reference(name)[0], atol=atol)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", FOLDED)
def test_the_graph_computes_the_logits_and_our_kernel_its_attentions(name: str, tmp_path: Path) -> None:
    graph = onnx_from_model(folded(name).model, preprocessing=None, max_batch=8)
    ir.save(graph, tmp_path / "model.onnx")
    logits = program_from_onnx(tmp_path / "model.onnx").run(images().numpy())
    exact, noise = reference(name)
    assert np.abs(logits - exact).max() <= limit_from_noise(noise, "fp32").largest
    assert "unknown" not in roles_of(graph.graph).values()
    matches = attentions_in(read_graph(tmp_path / "model.onnx"))
    refused = [match.name for match in matches if not isinstance(match, MatchedAttention)]
    assert refused == ([SHIFTED] if name == "swin" else [])
    assert [match.name for match in matches] == [attention.name for attention in attentions_of(graph.graph)]
    assert len(matches) == (3 if name == "swin" else 2)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["clip", "siglip", "convnext", "resnet"])
def test_the_graphs_of_other_classes_give_the_logits(name: str, tmp_path: Path) -> None:
    ir.save(onnx_from_model(folded(name).model, preprocessing=None, max_batch=8), tmp_path / "model.onnx")
    logits = program_from_onnx(tmp_path / "model.onnx").run(images().numpy())
    exact, noise = reference(name)
    assert np.abs(logits - exact).max() <= limit_from_noise(noise, "fp32").largest


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "precision"), [("swin", "fp16"), ("beit", "bf16")])
def test_half_precision_stays_within_the_limits(name: str, precision: Precision) -> None:
    graph = graph_from_model(loaded(name), precision, preprocessing=None, max_batch=8).model
    onnx.checker.check_model(ir.to_proto(graph), full_check=True)
    exact, noise = reference(name)
    error = emulated_logits(graph, images().numpy(), name=name) - exact
    limit = limit_from_noise(noise, precision)
    assert 0 < np.abs(error).max() <= limit.largest
