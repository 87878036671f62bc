"""Graphs of DeepViT: the CPU kernel in both runtimes, other precisions of OpenVINO, and faults that parity names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from gmmvit_deploy.artifacts import Bundle
from gmmvit_deploy.checkpoints.weights import bytes_from_model
from gmmvit_deploy.export import variants
from gmmvit_deploy.export.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.families import model_from_spec
from gmmvit_deploy.families.deepvit import DEEPVIT
from gmmvit_deploy.families.deepvit.model import DeepViTBlock
from gmmvit_deploy.families.deepvit.spec import DeepViTSpec
from gmmvit_deploy.graphs.quantize import QUANTIZED
from gmmvit_deploy.kernels.matcher import MatchedAttention
from gmmvit_deploy.kernels.onnxruntime_kernels import attentions_of_kernel
from gmmvit_deploy.layers.model import Model
from gmmvit_deploy.parity.reference import Reference
from gmmvit_deploy.parity.suspects import explain
from gmmvit_deploy.precision import Precision
from gmmvit_deploy.runners.onnxruntime import OnnxRuntimeRunner
from gmmvit_deploy.runtime.emulated_precision import emulated_logits
from gmmvit_deploy.runtime.onnxruntime import fused_graph, program_from_onnx
from gmmvit_deploy.runtime.openvino import our_kernels
from gmmvit_deploy.runtime.openvino_program import OpenVinoProgram
from gmmvit_deploy.scores.attention import attention_scores
from gmmvit_deploy.scores.heads import HeadBatchNorm, HeadMixing
from gmmvit_deploy.specs import MaskSpec
from tests.conftest import golden, has_bf16, once
from tests.kernels.test_masked_attention import needs_kernel
from tests.parity.faults import rebuilt

pytestmark = pytest.mark.export


@dataclass(frozen=True)
class Wide:
    """A bundle of a DeepViT with 12 heads of head dim 16, and its model."""

    bundle: Bundle
    model: Model

    def images(self, count: int) -> np.ndarray:
        return np.random.default_rng(count).standard_normal((count, 3, 32, 32), dtype=np.float32)

    def exact(self, images: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            logits: np.ndarray = self.model.double()(torch.from_numpy(images).double()).numpy()
        return logits


@pytest.fixture(scope="module")
def wide(shared: Path) -> Wide:
    small = DEEPVIT.small(MaskSpec())
    assert isinstance(small, DeepViTSpec)
    torch.manual_seed(0)
    model = model_from_spec(replace(small, image_size=32, dim=192, heads=12)).eval()
    weights = shared / "deepvit_wide.safetensors"
    weights.write_bytes(bytes_from_model(model))
    options = ExportOptions(input_kind="tensor", max_batch=8)
    return Wide(once(shared / "deepvit_wide", lambda out: bundle_from_checkpoint(weights, out, options)), model)


# ---- kernels -------------------------------------------------------------------------------------------------------


def test_the_kernel_takes_mixed_and_plain_blocks(wide: Wide) -> None:
    plain, mixed = attentions_of_kernel(onnx.load(wide.bundle.onnx_path))
    assert isinstance(plain, MatchedAttention)
    assert isinstance(mixed, MatchedAttention)
    assert plain.mixing == ()
    before, after = mixed.mixing
    assert before is None
    assert after.shape == (12, 12)
    assert mixed.scale == pytest.approx(0.25)


@needs_kernel
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_both_runtimes_with_the_kernel(batch: int, wide: Wide) -> None:
    images = wide.images(batch)
    expected = wide.exact(images)
    limit = 2e-5 * float(np.abs(expected).max())
    fused, why = fused_graph(wide.bundle.onnx_path)
    assert fused is not None, why
    assert not any(node.op_type == "Softmax" for node in onnx.load_from_string(fused.graph).graph.node)
    for program in (program_from_onnx(wide.bundle.onnx_path, fused=fused), program_from_onnx(wide.bundle.onnx_path)):
        np.testing.assert_allclose(program.run(images), expected, rtol=0, atol=limit)
    path = str(wide.bundle.onnx_path)
    ours = OpenVinoProgram(path, hint="f32", kernels=our_kernels("fp32")[0])
    assert ours.fused_attentions == 2
    for program in (ours, OpenVinoProgram(path, hint="f32")):
        np.testing.assert_allclose(program.run(images), expected, rtol=0, atol=limit)


@needs_kernel
@pytest.mark.skipif(not has_bf16(), reason="this CPU has no bf16")
def test_openvino_in_bfloat16(wide: Wide) -> None:
    images = wide.images(3)
    expected, path = wide.exact(images), str(wide.bundle.onnx_path)
    for kernels in (our_kernels("bf16")[0], None):
        logits = OpenVinoProgram(path, hint="bf16", kernels=kernels).run(images)
        assert np.abs(logits - expected).max() < 0.05 * np.abs(expected).max()


def test_the_kernel_takes_head_dims_of_the_golden_files(tensor_bundles: dict[str, Bundle]) -> None:
    matches = attentions_of_kernel(onnx.load(tensor_bundles["deepvit_cnn_scaled"].onnx_path))
    assert [match.head_dim for match in matches if isinstance(match, MatchedAttention)] == [9] * 4


@pytest.mark.parametrize(("head_dim", "precision"), [(33, "fp16"), (35, "bf16"), (33, "int8"), (35, "fp8")])
def test_odd_head_dims_in_other_precisions(head_dim: int, precision: Precision) -> None:
    small = DEEPVIT.small(MaskSpec())
    assert isinstance(small, DeepViTSpec)
    torch.manual_seed(0)
    model = model_from_spec(replace(small, dim=3 * head_dim, heads=3)).eval()
    images = np.random.default_rng(0).standard_normal((3, 3, 16, 16), dtype=np.float32)
    prepared = variants.graph_from_model(
        model, precision, preprocessing=None, max_batch=4, calibration=[images] if precision in QUANTIZED else None
    )
    with torch.inference_mode():
        expected = model.double()(torch.from_numpy(images).double()).numpy()
    logits = emulated_logits(prepared.proto, images, name=precision)
    share = 0.5 if precision in QUANTIZED else 0.05
    assert np.abs(logits - expected).max() < share * np.abs(expected).max()


# ---- faults --------------------------------------------------------------------------------------------------------


def _steps(model: Model, kind: type) -> Iterable[tuple[Any, str, Any]]:
    for _, scores in attention_scores(model):
        for name, step in list(scores.steps()):
            if isinstance(step, kind):
                yield scores, name, step


def _transpose(model: Model) -> None:
    for scores, name, step in _steps(model, HeadMixing):
        scores.put(name, HeadMixing(step.weight.detach().T.contiguous()))


def _epsilon(model: Model) -> None:
    for _, _, step in _steps(model, HeadBatchNorm):
        step.eps = 1e-3


def _without_transform_scale(model: Model) -> None:
    for _, scores in attention_scores(model):
        if "scale" in scores.after:
            scores.put("after.scale", None)


def _without_adjustment(model: Model) -> None:
    for block in model.modules():
        if isinstance(block, DeepViTBlock):
            block.scale_adjustment = 1.0


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_transpose, "head mixing transposed"),
        (_epsilon, "BatchNorm over the heads with an epsilon of 0.001"),
        (_without_transform_scale, "the transform scale left out"),
        (_without_adjustment, "the scale adjustment left out"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_faults_of_a_graph_are_named(
    change: Callable[[Model], None], name: str, tensor_bundles: dict[str, Bundle], tmp_path: Path
) -> None:
    bundle = tensor_bundles["deepvit_cnn_scaled"]
    inputs = golden("deepvit_cnn_scaled").inputs
    with OnnxRuntimeRunner(rebuilt(bundle, tmp_path / "bundle", change)) as runner:
        logits = runner.run(inputs)
    reference = Reference(bundle)
    trained, _ = reference.logits(inputs)
    limit = 1e-5 * float(np.abs(trained).max())
    assert float(np.abs(logits - trained).max()) > 10 * limit
    assert explain(bundle, reference, inputs, logits, limit) == name
