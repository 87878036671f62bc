"""Graphs of DeepViT: the CPU kernel in both runtimes, and other precisions of OpenVINO."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.checkpoints.weights import bytes_from_model
from gmmvit_deploy.export import variants
from gmmvit_deploy.export.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.graphs.quantize import QUANTIZED
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.deepvit import DEEPVIT
from gmmvit_deploy.models.families.deepvit.spec import DeepViTSpec
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.specs import MaskSpec
from gmmvit_deploy.precision import Precision
from gmmvit_deploy.runtimes.kernels.matcher import MatchedAttention
from gmmvit_deploy.runtimes.kernels.onnx_view import attentions_of_kernel
from gmmvit_deploy.runtimes.programs.emulated_precision import emulated_logits
from gmmvit_deploy.runtimes.programs.onnxruntime import program_from_onnx
from gmmvit_deploy.runtimes.programs.openvino import our_kernels
from gmmvit_deploy.runtimes.programs.openvino_program import OpenVinoProgram
from tests.conftest import once
from tests.runtimes.kernels.test_masked_attention import needs_kernel

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


@pytest.mark.rest
def test_the_kernel_takes_mixed_and_plain_blocks(wide: Wide) -> None:
    plain, mixed = attentions_of_kernel(onnx.load(wide.bundle.onnx_path))
    assert isinstance(plain, MatchedAttention)
    assert isinstance(mixed, MatchedAttention)
    assert plain.mixing == ()
    before, after = mixed.mixing
    assert before is None
    assert after.shape == (12, 12)
    assert mixed.scale == pytest.approx(0.25)


@pytest.mark.first(1)
@needs_kernel
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_both_runtimes_and_the_kernel(batch: int, wide: Wide) -> None:
    images = wide.images(batch)
    expected = wide.exact(images)
    limit = 2e-5 * float(np.abs(expected).max())
    path = str(wide.bundle.onnx_path)
    np.testing.assert_allclose(program_from_onnx(wide.bundle.onnx_path).run(images), expected, rtol=0, atol=limit)
    ours = OpenVinoProgram(path, hint="f32", kernels=our_kernels("fp32")[0])
    assert ours.fused_attentions == 2
    for program in (ours, OpenVinoProgram(path, hint="f32")):
        np.testing.assert_allclose(program.run(images), expected, rtol=0, atol=limit)


@pytest.mark.first(1)
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
