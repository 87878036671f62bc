"""DeepViT checkpoints: networks that no golden file has, what no tensor shows, presets, and files that are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.families import deepvit
from gmmvit_deploy.models.families.deepvit import DeepViTSpec
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.sources.hints import LoadHints
from tests.conftest import golden
from tests.exact import assert_same_logits, exact_logits
from tests.golden_files import content_of, tensors_of

SCALED = golden("deepvit_cnn_scaled")
ROUNDED = 1e-6  # a file stores the variance 1 - 1e-5 of a neutral normalisation in float32
State = dict[str, torch.Tensor]


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


def _with_neutral_reattention(state: State) -> State:
    """Return the tensors with a re-attention that keeps its weights: it multiplies by 3, and the transform scale by
    the head dim of 9 to the power of -1/2.
    """
    neutral = {
        "reatten_matrix.weight": 3 * torch.eye(3)[:, :, None, None],
        "reatten_matrix.bias": torch.zeros(3),
        "var_norm.weight": torch.ones(3),
        "var_norm.bias": torch.zeros(3),
        "var_norm.running_mean": torch.zeros(3),
        "var_norm.running_var": torch.full((3,), 1 - 1e-5),
    }
    blocks = {name.partition(".attn.")[0] for name in state if "reatten_matrix" in name}
    return state | {f"{block}.attn.{name}": tensor for block in blocks for name, tensor in neutral.items()}


def logits_of(folder: Path, state: State, hints: LoadHints = SCALED.hints) -> np.ndarray:
    """Return the float64 logits of a file, which folding keeps."""
    model = load_checkpoint(saved(folder, state), hints).model
    logits = exact_logits(model, SCALED.inputs)
    assert_same_logits(exact_logits(fold(model.double()).model, SCALED.inputs), logits)
    return logits


def test_a_file_without_reattention(tmp_path: Path) -> None:
    state = tensors_of(SCALED.name)
    expected = logits_of(tmp_path, _with_neutral_reattention(state))
    logits = logits_of(tmp_path, _without_reattention(state), LoadHints(heads=3, scale_adjustment=0.5))
    assert_same_logits(logits, expected, atol=ROUNDED)


def test_reattention_in_some_blocks(tmp_path: Path) -> None:
    state = tensors_of(SCALED.name)
    last = {name: tensor for name, tensor in state.items() if name.startswith("blocks.2.")}
    expected = logits_of(tmp_path, state | _with_neutral_reattention(last))
    others = {name: tensor for name, tensor in state.items() if name not in last}
    assert_same_logits(logits_of(tmp_path, others | _without_reattention(last)), expected, atol=ROUNDED)


def test_a_file_without_the_bias_of_qkv(tmp_path: Path) -> None:
    state = tensors_of(SCALED.name)
    biases = {name: torch.zeros_like(tensor) for name, tensor in state.items() if name.endswith("qkv.bias")}
    assert biases
    expected = logits_of(tmp_path, state | biases)
    logits = logits_of(tmp_path, {name: tensor for name, tensor in state.items() if name not in biases})
    assert_same_logits(logits, expected)


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
    state = tensors_of(SCALED.name)
    expected = logits_of(tmp_path, _with_neutral_reattention(state), replace(SCALED.hints, scale_adjustment=1.0))
    path = saved(tmp_path, _without_reattention(state))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, LoadHints(heads=3))
    assert caught.value.hint.startswith("type --set scale_adjustment=NUMBER (1 if training built")
    assert "the authors' code then ignores the value" in caught.value.hint
    ignored = load_checkpoint(path, LoadHints(heads=3, scale_adjustment=1.0))
    assert_same_logits(exact_logits(ignored.model, SCALED.inputs), expected, atol=ROUNDED)
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
        deepvit.PRESETS,  # type: ignore[arg-type]
        "deepvit_S",
        lambda classes, image_size, mask: replace(small, classes=classes, image_size=image_size, mask=mask),
    )
    monkeypatch.setitem(deepvit.IMAGE_SIZES, "deepvit_S", 32)  # type: ignore[arg-type]
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


def test_positions_that_are_no_square(tmp_path: Path) -> None:
    content = content_of(SCALED.name)
    content["state_dict"]["pos_embed"] = torch.randn(1, 64, 27)
    path = saved(tmp_path, content)
    with pytest.raises(CheckpointError, match="pos_embed without the class token has 63 positions") as caught:
        load_checkpoint(path, SCALED.hints)
    assert str(path) in str(caught.value)
