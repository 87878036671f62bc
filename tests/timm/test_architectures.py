"""Architectures of timm go through the whole export, and what cannot be exported is refused with the reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.runtimes.programs.onnxruntime import program_from_onnx
from gmmvit_deploy.tolerances import Noise, limit_from_noise
from tests.uneven_attention import attention_effects, perturbed

pytestmark = pytest.mark.integration

MAX_BATCH = 5
SMALL: dict[str, tuple[str, int, dict[str, Any]]] = {
    "hiera": ("hiera_tiny_224", 64, {"img_size": 64, "embed_dim": 16, "num_heads": 1, "stages": [1, 1, 1, 1]}),
    "levit": (
        "levit_128s",
        128,
        {"img_size": 128, "embed_dim": [16, 32, 48], "num_heads": [2, 2, 2], "depth": [1, 1, 1], "key_dim": 8},
    ),
    "swinv2": (
        "swinv2_tiny_window8_256",
        32,
        {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": [2], "num_heads": [2]},
    ),
}
"""Name of a test → (architecture, side of the images in pixels, arguments that make the model small)."""
GAINS = {"levit_128s": 1.3}  # with smaller weights, LeViT's last attention hardly moves the logits
VIT = {"img_size": 32, "depth": 1}


def state_dict(folder: Path, architecture: str, args: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    arguments = {name: tuple(value) if isinstance(value, list) else value for name, value in args.items()}
    network = timm.create_model(architecture, pretrained=False, num_classes=10, **arguments).eval()
    perturbed(network, GAINS.get(architecture, 1.0))
    torch.save(network.state_dict(), folder / "weights.pth")
    return folder / "weights.pth"


def exported(folder: Path, weights: Path, hints: LoadHints) -> Bundle:
    options = ExportOptions(input_kind="tensor", max_batch=MAX_BATCH)
    return bundle_from_checkpoint(weights, folder / "bundle", options, hints=hints)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SMALL)
def test_every_batch_size_gives_the_logits(name: str, tmp_path: Path) -> None:
    architecture, size, args = SMALL[name]
    weights = state_dict(tmp_path, architecture, args)
    hints = LoadHints(model=architecture, model_args=args, image_size=size)
    bundle = exported(tmp_path, weights, hints)
    model = load_checkpoint(weights, hints).model.eval()
    images = torch.randn(MAX_BATCH, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(images).numpy()
        exact = copy.deepcopy(model).double()(images.double()).numpy()
    errors, scale = np.abs(expected - exact), float(np.abs(exact).max())
    noise = Noise(largest=float(errors.max()), rms=float(np.sqrt((errors**2).mean())), scale=scale)
    limit = limit_from_noise(noise).largest + noise.largest  # the expected logits are float32 themselves
    run = program_from_onnx(bundle.onnx_path).run
    for batch in (1, 2, 3, MAX_BATCH):
        np.testing.assert_allclose(run(images.numpy()[:batch]), expected[:batch], rtol=0, atol=limit)
    effects = attention_effects(model, images)
    assert effects
    assert min(effects) > 100 * limit  # a wrong attention would exceed the limit above


def one_image_at_a_time(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def looping(self: VisionTransformer, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return torch.cat([forward(self, image[None]) for image in x])

    return looping


def test_a_forward_that_loops_over_the_batch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = state_dict(tmp_path, "test_vit", VIT)
    monkeypatch.setattr(VisionTransformer, "forward", one_image_at_a_time(VisionTransformer.forward))
    with pytest.raises(ExportError, match=r"fixed batch: expected a dynamic first dimension of tensor") as caught:
        exported(tmp_path, weights, LoadHints(model="test_vit", model_args=VIT))
    assert "without a loop over the images" in caught.value.hint
    assert not (tmp_path / "bundle").exists()


def reading_values(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reading(self: VisionTransformer, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        logits = forward(self, x)
        return logits if float(logits.sum()) > 0 else -logits

    return reading


def without_onnx_operator(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def decomposing(self: VisionTransformer, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        logits = forward(self, x)
        return torch.linalg.svd(logits[:, None] * logits[:, :, None])[1]

    return decomposing


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("patch", "reason"),
    [(reading_values, "data-dependent"), (without_onnx_operator, "No ONNX function found for .*_linalg_svd")],
)
def test_a_forward_that_cannot_be_exported_is_refused_with_the_reason(
    patch: Callable[..., Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = state_dict(tmp_path, "test_vit", VIT)
    monkeypatch.setattr(VisionTransformer, "forward", patch(VisionTransformer.forward))
    with pytest.raises(ExportError, match=rf"^the ONNX exporter of torch \S+ failed: .*{reason}") as e:
        exported(tmp_path, weights, LoadHints(model="test_vit", model_args=VIT))
    assert "\n" not in str(e.value)
    assert not (tmp_path / "bundle").exists()
