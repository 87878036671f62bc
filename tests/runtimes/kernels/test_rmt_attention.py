"""Attentions of RMT: this project's kernel computes each of them; roles and engine forms of the three releases."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from gmmvit_deploy.export.onnx_from_model import onnx_from_model
from gmmvit_deploy.inference.matcher import MatchedAttention, attentions_in_onnx
from gmmvit_deploy.inference.openvino_program import OpenVinoProgram
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.rmt import RMT
from gmmvit_deploy.models.folding.fold import engine_passes, fold, fold_for_engines
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.specs import MaskSpec
from gmmvit_deploy.runtimes.programs.onnxruntime import program_from_onnx
from gmmvit_deploy.runtimes.programs.openvino import our_kernels
from tests.models.families.small_models import failing_rules
from tests.runtimes.kernels.test_masked_attention import needs_kernel

pytestmark = pytest.mark.integration
RELEASES = {"2023": 0, "2024": 40, "token_label": 40}
each_release = pytest.mark.parametrize("release", RELEASES)


@functools.cache
def model(release: str) -> Model:
    torch.manual_seed(0)
    spec = replace(RMT.small(MaskSpec(kind="decay")), release=release, projection_dim=RELEASES[release])
    built = model_from_spec(spec).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return built


@functools.cache
def graph_of(release: str) -> onnx.ModelProto:
    with failing_rules():
        return onnx_from_model(fold(model(release)).model, preprocessing=None, max_batch=8)


@pytest.mark.first(1)
@each_release
def test_the_kernel_takes_rows_columns_and_the_whole_grid(release: str) -> None:
    matches = attentions_in_onnx(graph_of(release).SerializeToString())
    assert {match.name: (match.windows, match.tokens) for match in matches if isinstance(match, MatchedAttention)} == {
        "stages.0.blocks.0.attention.rows": ((6,), 6),
        "stages.0.blocks.0.attention.columns": ((6,), 6),
        "stages.1.blocks.0.attention.tokens": ((), 9),
    }
    assert len(matches) == 3


@pytest.mark.first(1)
@needs_kernel
@each_release
def test_logits_through_the_kernel_and_in_onnxruntime(release: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(graph_of(release), path)
    kernels, why = our_kernels("fp32")
    in_openvino = OpenVinoProgram(str(path), hint="f32", kernels=kernels)
    assert in_openvino.fused_attentions == 3, why
    for batch in (1, 3, 8):
        images = np.random.default_rng(batch).standard_normal((batch, 3, 24, 24), dtype=np.float32)
        with torch.inference_mode():
            expected = model(release)(torch.from_numpy(images)).numpy()
        for program in (program_from_onnx(path), in_openvino):
            np.testing.assert_allclose(program.run(images), expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_engines_get_attention_of_four_dimensions() -> None:
    folded = fold(model("2024"))
    joined = fold_for_engines(folded, engine_passes(folded.model.spec))
    assert joined.passes["join_rows"] == ("stages.0.blocks.0.attention",)
    shapes: list[int] = []
    for module in joined.model.modules():
        if hasattr(module, "scores"):
            module.scores.register_forward_hook(lambda module, given, output: shapes.append(output.dim()))
    images = torch.randn(3, 3, 24, 24)
    with torch.inference_mode():
        assert joined.model(images).allclose(folded.model(images), atol=1e-6)
    assert shapes == [4, 4, 4]
