"""Backbones of DINO and DINOv2 with linear heads, held to timm and to the heads written out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import GmmvitError
from gmmvit_deploy.models.sources.hints import LoadHints

pytestmark = pytest.mark.integration

ARGS = {"img_size": 28, "embed_dim": 24, "depth": 3, "num_heads": 2}
CLASSES = 5
IMAGES = torch.randn(3, 3, 28, 28, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def dinov2_file(folder: Path, name: str) -> tuple[Path, nn.Module]:
    """Write random weights under DINOv2's names; return the file and the model that timm makes of it."""
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=0, **ARGS).eval()
    original: dict[str, Tensor] = {"mask_token": torch.zeros(1, ARGS["embed_dim"])}
    tokens = 5  # a class token and 2 × 2 patches
    for key, tensor in model.state_dict().items():
        value = 0.3 * torch.randn(tensor.shape)
        if key == "pos_embed":
            value = torch.randn(1, tokens, ARGS["embed_dim"])
        key = {"reg_token": "register_tokens"}.get(key, key)
        if "giant" in name:
            key = key.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3")
        original[key] = value
    path = folder / "backbone.pth"
    torch.save(original, path)
    model.load_state_dict(checkpoint_filter_fn(dict(original), model), strict=True)
    return path, model.double()


def head_file(folder: Path, features: int, *, dino: bool) -> tuple[Path, nn.Linear]:
    torch.manual_seed(3)
    linear = nn.Linear(features, CLASSES)
    path = folder / "head.pth"
    state = linear.state_dict()
    torch.save({"state_dict": {f"module.linear.{k}": v for k, v in state.items()}} if dino else state, path)
    return path, linear.double()


def block_outputs(model: nn.Module, blocks: int) -> list[Tensor]:
    """Return the normed tokens of the last blocks, oldest first, computed block by block."""
    x = model.norm_pre(model._pos_embed(model.patch_embed(IMAGES)))
    outputs = []
    for block in model.blocks:
        x = block(x)
        outputs.append(model.norm(x))
    return outputs[-blocks:]


def features(model: nn.Module, blocks: int, *, average: bool) -> Tensor:
    outputs = block_outputs(model, blocks)
    mean = [outputs[-1][:, model.num_prefix_tokens :].mean(dim=1)] if average else []
    return torch.cat([tokens[:, 0] for tokens in outputs] + mean, dim=-1)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "blocks", "average", "names"),
    [
        ("vit_small_patch14_dinov2", 1, True, "dino"),  # the names do not make the features interleaved
        ("vit_small_patch14_dinov2", 3, True, ""),
        ("vit_small_patch14_reg4_dinov2", 2, False, ""),
        ("vit_small_patch14_reg4_dinov2", 1, True, ""),
        ("vit_giant_patch14_dinov2", 1, False, ""),
    ],
)
def test_dinov2_with_a_linear_head(tmp_path: Path, name: str, blocks: int, average: bool, names: str) -> None:
    path, model = dinov2_file(tmp_path, name)
    head, linear = head_file(tmp_path, (blocks + average) * ARGS["embed_dim"], dino=names == "dino")
    loaded = load_checkpoint(
        path, LoadHints(model=name, model_args=ARGS, head=str(head), head_blocks=blocks, head_average=average)
    )
    with torch.inference_mode():
        expected = linear(features(model, blocks, average=average))
        logits = loaded.model.double()(IMAGES)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    assert "mask_token" in loaded.unused
    assert loaded.spec.classes == CLASSES


def test_dino_interleaves_class_token_and_mean(tmp_path: Path) -> None:
    name = "vit_tiny_patch16_224"
    args = {**ARGS, "patch_size": 14}
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=0, **args).eval()
    path = tmp_path / "dino.pth"
    torch.save({"teacher": {f"backbone.{key}": value for key, value in model.state_dict().items()}}, path)
    head, linear = head_file(tmp_path, 2 * ARGS["embed_dim"], dino=True)
    loaded = load_checkpoint(
        path, LoadHints(model=name, model_args=args, head=str(head), head_blocks=1, head_average=True)
    )
    with torch.inference_mode():
        (tokens,) = block_outputs(model.double(), 1)
        interleaved = torch.stack([tokens[:, 0], tokens[:, 1:].mean(dim=1)], dim=-1).reshape(len(IMAGES), -1)
        torch.testing.assert_close(loaded.model.double()(IMAGES), linear(interleaved), rtol=0, atol=1e-12)
    assert loaded.spec.head_interleaved


@pytest.mark.parametrize("average", [False, True])
def test_a_classifier_of_the_linear_evaluation_is_chosen_by_its_name(tmp_path: Path, average: bool) -> None:
    name = "vit_small_patch14_dinov2"
    path, model = dinov2_file(tmp_path, name)
    torch.manual_seed(3)
    heads = {
        f"classifier_{blocks}_blocks_avgpool_{pooled}_lr_0_{rate}": nn.Linear((blocks + pooled) * 24, CLASSES)
        for blocks in (1, 3)
        for pooled in (False, True)
        for rate in ("00100", "01000")
    }
    state = {f"module.classifiers_dict.{n}.linear.{k}": v for n, h in heads.items() for k, v in h.state_dict().items()}
    head = tmp_path / "running_checkpoint_linear_eval.pth"
    torch.save({"iteration": 99, "linear_classifiers": state, "optimizer": {}, "best_accuracy": 0.8}, head)
    hints = LoadHints(model=name, model_args=ARGS, head=str(head))
    with pytest.raises(GmmvitError, match="holds 8 linear classifiers: classifier_1_blocks_avgpool_False") as caught:
        load_checkpoint(path, hints)
    assert "add --set head_name=NAME" in caught.value.hint
    chosen = f"classifier_3_blocks_avgpool_{average}_lr_0_01000"
    hints = LoadHints(model=name, model_args=ARGS, head=str(head), head_name=chosen)
    loaded = load_checkpoint(path, hints)
    with torch.inference_mode():
        expected = heads[chosen].double()(features(model, 3, average=average))
        torch.testing.assert_close(loaded.model.double()(IMAGES), expected, rtol=0, atol=1e-12)
    with pytest.raises(GmmvitError, match="--set head_blocks=1, but the classifier"):
        load_checkpoint(path, replace(hints, head_blocks=1))
