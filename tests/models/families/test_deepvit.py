"""DeepViT checkpoints: networks that no golden file has, what no tensor shows, presets, and files that are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.families.deepvit import spec as presets
from gmmvit_deploy.models.families.deepvit.spec import DeepViTSpec
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.sources.hints import LoadHints
from tests.conftest import golden
from tests.exact import assert_same_logits, exact_logits
from tests.golden_files import content_of, tensors_of

SCALED = golden("deepvit_cnn_scaled")
State = dict[str, torch.Tensor]


def deepvit_logits(
    state: State, images: torch.Tensor, *, heads: int, scale_adjustment: float, transform_scale: bool
) -> torch.Tensor:
    """Return the logits (B, C) in float64, from the tensors of a file by the formulas of the paper authors' code."""
    weights = {name: tensor.double() for name, tensor in state.items()}

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        product = x @ weights[f"{name}.weight"].T
        return product + weights[f"{name}.bias"] if f"{name}.bias" in weights else product

    def layer_norm(x: torch.Tensor, name: str) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return normed * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def batch_norm(x: torch.Tensor, name: str) -> torch.Tensor:
        mean, variance, gamma, beta = (
            weights[f"{name}.{part}"][:, None, None] for part in ("running_mean", "running_var", "weight", "bias")
        )
        return gamma * (x - mean) / (variance + 1e-5).sqrt() + beta

    def attention(x: torch.Tensor, name: str) -> torch.Tensor:
        batch, tokens, dim = x.shape
        head_dim = dim // heads
        q, k, v = linear(x, f"{name}.qkv").reshape(batch, tokens, 3, heads, head_dim).permute(2, 0, 3, 1, 4)
        mixed = (torch.einsum("bhid,bhjd->bhij", q, k) * head_dim**-0.5).softmax(-1)
        if f"{name}.reatten_matrix.weight" in weights:
            theta = weights[f"{name}.reatten_matrix.weight"][:, :, 0, 0]
            mixed = torch.einsum("gh,bhij->bgij", theta, mixed)
            mixed = batch_norm(mixed + weights[f"{name}.reatten_matrix.bias"][:, None, None], f"{name}.var_norm")
            mixed = mixed * (head_dim**-0.5 if transform_scale else 1)
        out = torch.einsum("bhij,bhjd->bihd", mixed, v).reshape(batch, tokens, dim)
        return linear(out, f"{name}.proj")

    x = images.double()
    if "patch_embed.conv1.weight" in weights:
        x = functional.conv2d(x, weights["patch_embed.conv1.weight"], stride=2, padding=3)
        x = batch_norm(x, "patch_embed.bn1").clamp(min=0)
        x = functional.conv2d(x, weights["patch_embed.conv2.weight"], padding=1)
        x = batch_norm(x, "patch_embed.bn2").clamp(min=0)
    kernel = weights["patch_embed.proj.weight"]
    x = functional.conv2d(x, kernel, weights["patch_embed.proj.bias"], stride=kernel.shape[-1])
    x = x.flatten(2).transpose(1, 2)
    x = torch.cat([weights["cls_token"].expand(len(x), -1, -1), x], dim=1) + weights["pos_embed"]
    a, block = scale_adjustment, 0
    while f"blocks.{block}.norm1.weight" in weights:
        x = x + attention(layer_norm(a * x, f"blocks.{block}.norm1"), f"blocks.{block}.attn") / a
        hidden = functional.gelu(linear(layer_norm(a * x, f"blocks.{block}.norm2"), f"blocks.{block}.mlp.fc1"))
        x = x + linear(hidden, f"blocks.{block}.mlp.fc2") / a
        block += 1
    return linear(layer_norm(x, "norm")[:, 0], "head")


def saved(folder: Path, content: Any) -> Path:
    torch.save(content, folder / "deepvit.pth.tar")
    return folder / "deepvit.pth.tar"


def spec_of(path: Path, hints: LoadHints) -> DeepViTSpec:
    spec = load_checkpoint(path, hints).spec
    assert isinstance(spec, DeepViTSpec)
    return spec


# ---- networks that no golden file has ------------------------------------------------------------------------------


def _without_reattention(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if "reatten_matrix" not in name and "var_norm" not in name}


@pytest.mark.parametrize("part", ["no re-attention", "re-attention in one block", "no qkv bias"])
def test_other_networks_of_the_authors_code(part: str, tmp_path: Path) -> None:
    state, hints = tensors_of(SCALED.name), SCALED.hints
    if part == "no re-attention":
        state, hints = _without_reattention(state), LoadHints(heads=3, scale_adjustment=0.5)
    elif part == "re-attention in one block":
        state = {
            name: tensor
            for name, tensor in state.items()
            if not name.startswith(("blocks.2.attn.rea", "blocks.2.attn.v"))
        }
    else:
        state = {name: tensor for name, tensor in state.items() if not name.endswith("qkv.bias")}
    loaded = load_checkpoint(saved(tmp_path, state), hints)
    expected = deepvit_logits(
        state, torch.from_numpy(SCALED.inputs), heads=3, scale_adjustment=0.5, transform_scale=True
    )
    assert_same_logits(exact_logits(loaded.model, SCALED.inputs), expected)
    assert_same_logits(exact_logits(fold(loaded.model.double()).model, SCALED.inputs), expected)


def test_the_number_of_heads_is_asked_for_without_reattention(tmp_path: Path) -> None:
    path = saved(tmp_path, _without_reattention(tensors_of(SCALED.name)))
    with pytest.raises(
        CheckpointError, match="no tensor of this file shows the number of heads and the scale"
    ) as caught:
        load_checkpoint(path)
    assert "--set heads=N" in caught.value.hint
    assert "--set scale_adjustment=NUMBER" in caught.value.hint
    assert "transform" not in caught.value.hint  # without re-attention there is nothing that the factor multiplies
    with pytest.raises(CheckpointError, match="--set transform_scale=yes multiplies the mixed weights") as caught:
        load_checkpoint(path, LoadHints(heads=3, scale_adjustment=0.5, transform_scale=True))
    assert caught.value.hint == "omit --set transform_scale=yes"
    with pytest.raises(CheckpointError, match="not a multiple of 4 heads"):
        load_checkpoint(path, LoadHints(heads=4, scale_adjustment=0.5))


def test_a_network_without_reattention_may_have_ignored_its_scale_adjustment(tmp_path: Path) -> None:
    """The authors' code ignores the scale adjustment with re_atten=False; the file does not show re_atten."""
    state = _without_reattention(tensors_of(SCALED.name))
    path = saved(tmp_path, state)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, LoadHints(heads=3))
    assert caught.value.hint.startswith("type --set scale_adjustment=NUMBER (1 if training built")
    assert "the authors' code then ignores the value" in caught.value.hint
    ignored = load_checkpoint(path, LoadHints(heads=3, scale_adjustment=1.0))
    expected = deepvit_logits(
        state, torch.from_numpy(SCALED.inputs), heads=3, scale_adjustment=1, transform_scale=False
    )
    assert_same_logits(exact_logits(ignored.model, SCALED.inputs), expected)
    assert not [finding for finding in ignored.findings if "re_atten" in finding.what]
    applied = load_checkpoint(path, LoadHints(heads=3, scale_adjustment=0.5))
    (warning,) = [finding for finding in applied.findings if "re_atten" in finding.what]
    assert (warning.severity, warning.where) == ("warning", "blocks")
    assert "the scale adjustment is 0.5" in warning.what
    assert "type --set scale_adjustment=1" in warning.what
    logits = [exact_logits(loaded.model, SCALED.inputs) for loaded in (ignored, applied)]
    assert np.abs(logits[0] - logits[1]).max() > 1e-2


# ---- what no tensor shows ------------------------------------------------------------------------------------------


@pytest.fixture
def small_preset(monkeypatch: pytest.MonkeyPatch) -> str:
    """``deepvit_S``, which the golden file names, with the sizes of the golden file."""
    small = spec_of(SCALED.path, SCALED.hints)
    monkeypatch.setitem(
        presets.PRESETS,  # type: ignore[arg-type]
        "deepvit_S",
        lambda classes, image_size, mask: replace(small, classes=classes, image_size=image_size, mask=mask),
    )
    monkeypatch.setitem(presets.IMAGE_SIZES, "deepvit_S", 32)  # type: ignore[arg-type]
    return "deepvit_S"


def test_a_preset_of_the_same_sizes_is_used(small_preset: str) -> None:
    loaded = load_checkpoint(SCALED.path)
    assert loaded.spec == spec_of(SCALED.path, SCALED.hints)
    origin = f"the preset {small_preset}, which arch of the file names"
    assert loaded.taken_from == {"scale_adjustment": origin, "transform_scale": origin}
    assert (loaded.images.mean, loaded.images.std, loaded.images.crop_pct) == ((0.5,) * 3, (0.5,) * 3, 0.9)


def test_preset_option(small_preset: str) -> None:
    loaded = load_checkpoint(golden("deepvit_cnn_scaled").path, LoadHints(preset=small_preset))
    assert loaded.taken_from["scale_adjustment"] == f"the preset {small_preset}, which --preset names"
    with pytest.raises(CheckpointError, match=r"does not match the preset deepvit_S: .*transform_scale False"):
        load_checkpoint(SCALED.path, LoadHints(preset=small_preset, transform_scale=False))


# ---- files that are refused ----------------------------------------------------------------------------------------


def _put(name: str, tensor: torch.Tensor) -> Callable[[State], object]:
    return lambda state: state.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_put("blocks.400000000.norm1.weight", torch.ones(27)), "counts 400000001 layers, but the file has only"),
        (_put("pos_embed", torch.randn(1, 64, 27)), "pos_embed without the class token has 63 positions"),
        (_put("blocks.2.attn.reatten_matrix.weight", torch.randn(3, 3)), r"reatten_matrix.weight has shape \(3, 3\)"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_damaged_files(change: Callable[[State], object], message: str, tmp_path: Path) -> None:
    content = content_of(SCALED.name)
    change(content["state_dict"])
    path = saved(tmp_path, content)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(path, SCALED.hints)
    assert str(path) in str(caught.value)
