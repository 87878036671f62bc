"""The tutorial's ViT with positions in the file, and the versions of the tutorial that are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.checkpoints.reading import read_tensors
from gmmvit_deploy.checkpoints.weights import bytes_from_model
from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.families.naive_vit import NaiveViTSpec
from gmmvit_deploy.models.layers.positions import sinusoidal_positions
from gmmvit_deploy.models.sources.hints import LoadHints
from tests.conftest import golden

KEYS = ("positional_embeddings", "pos_embed")
CASE = golden("mnist_vit")
State = dict[str, torch.Tensor]


def tutorial_state() -> State:
    state: State = torch.load(CASE.path, weights_only=True)
    return state


def saved(folder: Path, state: State) -> Path:
    torch.save(state, folder / "mnist.pt")
    return folder / "mnist.pt"


def other_positions() -> torch.Tensor:
    return sinusoidal_positions(50, 8)[0] + 0.5 * torch.randn(50, 8, generator=torch.Generator().manual_seed(3))


def tutorial_logits(state: State, positions: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """Compute the tutorial's network in float64 from the tensors of the file; two blocks, two heads, 7 × 7 patches."""
    weights = {name: tensor.double() for name, tensor in state.items()}

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return nn.functional.layer_norm(x, (8,), weights[f"{name}.weight"], weights[f"{name}.bias"], eps=1e-5)

    patches = nn.functional.unfold(images.double(), kernel_size=4, stride=4).transpose(1, 2)
    x = linear(patches, "linear_mapper")
    x = torch.cat([weights["class_token"].expand(len(x), 1, 8), x], dim=1) + positions.double()
    for block in ("blocks.0", "blocks.1"):
        normed, heads = norm(x, f"{block}.norm1"), []
        for head in range(2):
            q, k, v = (
                linear(normed[..., 4 * head : 4 * head + 4], f"{block}.mhsa.{part}_mappings.{head}") for part in "qkv"
            )
            heads.append((q @ k.transpose(1, 2) / 2).softmax(-1) @ v)
        x = x + torch.cat(heads, dim=-1)
        hidden = nn.functional.gelu(linear(norm(x, f"{block}.norm2"), f"{block}.mlp.0"))
        x = x + linear(hidden, f"{block}.mlp.2")
    return linear(x[:, 0], "mlp.0")


def logits_of(path: Path, hints: LoadHints = CASE.hints) -> np.ndarray:
    with torch.inference_mode():
        logits: np.ndarray = load_checkpoint(path, hints).model(torch.from_numpy(CASE.inputs)).numpy()
    return logits


@pytest.mark.parametrize("key", KEYS)
def test_stored_sinusoids_change_nothing(key: str, tmp_path: Path) -> None:
    path = saved(tmp_path, tutorial_state() | {key: sinusoidal_positions(50, 8)[0]})
    loaded = load_checkpoint(path, CASE.hints)
    assert loaded.spec == replace(load_checkpoint(CASE.path, CASE.hints).spec, stored_positions=True)  # type: ignore[call-arg]
    np.testing.assert_array_equal(logits_of(path), logits_of(CASE.path))


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("batched", [False, True], ids=["N, D", "1, N, D"])
def test_the_logits_follow_the_positions_of_the_file(key: str, batched: bool, tmp_path: Path) -> None:
    positions, state = other_positions(), tutorial_state()
    path = saved(tmp_path, state | {key: positions[None] if batched else positions})
    expected = tutorial_logits(state, positions, torch.from_numpy(CASE.inputs)).numpy()
    assert np.abs(expected - CASE.logits).max() > 0.5
    np.testing.assert_allclose(logits_of(path), expected, rtol=0, atol=1e-5)


def test_the_number_of_positions_shows_the_side_of_the_images(tmp_path: Path) -> None:
    path = saved(tmp_path, tutorial_state() | {KEYS[0]: other_positions()})
    assert load_checkpoint(path, LoadHints(channels=1)).spec.image_size == 28
    assert load_checkpoint(path, LoadHints(channels=4)).spec.image_size == 14  # 16 values per patch: 4 · 2 · 2
    with pytest.raises(CheckpointError, match="--image-size 32 contradicts the file: its tensors show 28"):
        load_checkpoint(path, LoadHints(channels=1, image_size=32))
    with pytest.raises(CheckpointError, match="no tensor of this file shows the channels of the images") as caught:
        load_checkpoint(path)
    assert load_checkpoint(path, LoadHints(image_size=28)).spec.channels == 1
    assert caught.value.hint.startswith("type --set channels=N with the values of the training")
    with pytest.raises(CheckpointError, match=r"takes 16 values of a patch of the image; expected 3·p·p"):
        load_checkpoint(path, LoadHints(channels=3))


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (torch.zeros(51, 8), "positional_embeddings, without the class token, has 50 positions; expected a square"),
        (torch.zeros(50), r"positional_embeddings has shape \(50,\); expected 2 dimensions"),
        (torch.zeros(2, 50, 8), r"positional_embeddings is converted to shape \(2, 50, 8\), expected \(1, 50, 8\)"),
    ],
    ids=["51 tokens", "rank 1", "two images"],
)
def test_positions_that_do_not_fit_are_refused(positions: torch.Tensor, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(saved(tmp_path, tutorial_state() | {KEYS[0]: positions}), LoadHints(channels=1))


@pytest.mark.parametrize("extra", [{}, {"pos_embed": torch.zeros(50, 8)}], ids=["without positions", "pos_embed"])
def test_the_first_version_is_refused_by_name(extra: State, tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in tutorial_state().items() if not name.startswith("blocks.")}
    state |= {f"{norm}.{part}": torch.ones(50, 8) for norm in ("ln1", "ln2") for part in ("weight", "bias")}
    state |= {f"msa.{part}_mappings.{head}.weight": torch.ones(4, 4) for part in "qkv" for head in range(2)}
    state |= {"enc_mlp.0.weight": torch.ones(8, 8), "enc_mlp.0.bias": torch.ones(8)}
    with pytest.raises(CheckpointError, match=r"the first version of MyViT, .* \(ln1, msa, ln2, enc_mlp\)") as caught:
        load_checkpoint(saved(tmp_path, state | extra), CASE.hints)
    assert "n_blocks" in caught.value.hint


def test_weights_of_a_bundle_hold_stored_positions(tmp_path: Path) -> None:
    path = saved(tmp_path, tutorial_state() | {KEYS[0]: other_positions()})
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(bytes_from_model(load_checkpoint(path, CASE.hints).model))
    again = load_checkpoint(weights)
    assert isinstance(again.spec, NaiveViTSpec)
    assert again.spec.stored_positions
    np.testing.assert_array_equal(logits_of(weights, LoadHints()), logits_of(path))
    weights.write_bytes(bytes_from_model(load_checkpoint(CASE.path, CASE.hints).model))
    assert "positions" not in read_tensors(weights).tensors
