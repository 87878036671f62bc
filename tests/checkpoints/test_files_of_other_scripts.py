"""Files as other training scripts write them: a second set of weights, prefixes of wrappers, other data types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.sources.hints import LoadHints
from tests.golden_files import golden

VIT = golden("vit_gmm")
STATE: dict[str, Tensor] = torch.load(VIT.path, weights_only=True)["model_state_dict"]
AVERAGE = {name: tensor * 1.01 for name, tensor in STATE.items()}


def under(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def loaded_head(content: Any, folder: Path, weights: str | None = None) -> Tensor:
    torch.save(content, folder / "file.pth")
    return load_checkpoint(folder / "file.pth", LoadHints(weights=weights)).model.get_parameter("head.weight")


@pytest.mark.parametrize(
    ("content", "raw", "average"),
    [
        ({"model": STATE, "ema": AVERAGE}, "model", "ema"),
        ({"model": STATE, "ema": {"decay": 0.9, "shadow": AVERAGE}}, "model", "ema.shadow"),
        ({"model": STATE, "ema_model": under("module.", AVERAGE)}, "model", "ema_model"),
        ({"net": STATE, "net_ema": AVERAGE}, "net", "net_ema"),
        ({"model_state_dict": STATE, "ema_model_state_dict": AVERAGE}, "model_state_dict", "ema_model_state_dict"),
        ({"raw": STATE, "avg": AVERAGE}, "raw", "avg"),
        ({"state_dict": under("model.", STATE) | under("ema.", AVERAGE)}, "model", "ema"),
        ({"state_dict": STATE, "callbacks": {"EMA": {"weights": AVERAGE}}}, "state_dict", "callbacks.EMA.weights"),
    ],
)
def test_a_second_set_of_weights_is_asked_for(content: Any, raw: str, average: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        loaded_head(content, tmp_path)
    assert raw in str(caught.value)
    assert average in str(caught.value)
    assert caught.value.hint == f"type --set weights={raw} or --set weights={average}"
    assert loaded_head(content, tmp_path, raw).equal(STATE["mlp_head.1.weight"])
    assert loaded_head(content, tmp_path, average).equal(AVERAGE["mlp_head.1.weight"])


@pytest.mark.parametrize("weights", ["averaged", "best"])
def test_a_set_that_the_file_does_not_name_so_is_answered_with_the_keys(weights: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        loaded_head({"model": STATE, "ema": AVERAGE}, tmp_path, weights)
    assert caught.value.hint == "type --set weights=model or --set weights=ema"


def test_averages_without_names_are_asked_for(tmp_path: Path) -> None:
    content = {"model": STATE, "ema": {"shadow_params": list(AVERAGE.values())}}
    with pytest.raises(CheckpointError, match=r"and tensors of the same shapes under 'ema\.shadow_params'"):
        loaded_head(content, tmp_path)
    assert loaded_head(content, tmp_path, "model").equal(STATE["mlp_head.1.weight"])
    with pytest.raises(CheckpointError, match=r"tensors without names under 'ema\.shadow_params'"):
        loaded_head(content, tmp_path, "ema.shadow_params")


def test_an_average_with_other_names_is_asked_for(tmp_path: Path) -> None:
    """As LitEma writes it: the names have no dots."""
    average = {f"model_ema.{name.replace('.', '')}": tensor for name, tensor in AVERAGE.items()}
    content = {"state_dict": under("net.", STATE) | average}
    with pytest.raises(CheckpointError, match=r"of the same shapes under net\. and model_ema\."):
        loaded_head(content, tmp_path)
    assert loaded_head(content, tmp_path, "net").equal(STATE["mlp_head.1.weight"])


def test_two_sets_of_safetensors_are_asked_for(tmp_path: Path) -> None:
    content = {name: t.clone() for name, t in (under("net.", STATE) | under("ema.", AVERAGE)).items()}
    save_file(content, path := tmp_path / "file.safetensors")
    with pytest.raises(CheckpointError, match=r"of the same shapes under"):
        load_checkpoint(path)
    loaded = load_checkpoint(path, LoadHints(weights="ema"))
    assert loaded.model.get_parameter("head.weight").equal(AVERAGE["mlp_head.1.weight"])


def test_containers_that_share_their_content_are_read_once(tmp_path: Path) -> None:
    """Without it, a file of 5 KB takes a minute, and one of 10 KB hours."""
    nested: Any = {str(index): {"a": torch.zeros(1)} for index in range(60)}
    for _ in range(3):
        nested = {str(index): nested for index in range(60)}
    assert loaded_head({"model": STATE, "other": nested}, tmp_path).equal(STATE["mlp_head.1.weight"])


def test_the_body_of_a_timm_network_is_no_prefix(tmp_path: Path) -> None:
    """The classifier of an EfficientViT is head.classifier.4."""
    network = timm.create_model("efficientvit_b0", num_classes=5).eval()
    torch.save(network.state_dict(), tmp_path / "file.pth")
    loaded = load_checkpoint(tmp_path / "file.pth", LoadHints(model="efficientvit_b0", image_size=64))
    assert loaded.unused == {}


def test_values_beyond_float32_are_refused(tmp_path: Path) -> None:
    state = {name: tensor.double() for name, tensor in STATE.items()}
    state["mlp_head.1.weight"][0, 0] = 1e300
    with pytest.raises(CheckpointError, match="infinite"):
        loaded_head(state, tmp_path)


@pytest.mark.parametrize(
    "optimiser",
    [
        {"state": {i: {"exp_avg": tensor, "exp_avg_sq": tensor} for i, tensor in enumerate(STATE.values())}},
        {"momentum": STATE},
        {"momentum": list(STATE.values())},
    ],
)
def test_the_state_of_an_optimiser_is_no_second_set(optimiser: Any, tmp_path: Path) -> None:
    content = {"model": STATE, "optimizer": optimiser}
    assert loaded_head(content, tmp_path).equal(STATE["mlp_head.1.weight"])


@pytest.mark.parametrize("prefix", ["net.", "timm_model.", "lightning.net."])
def test_the_prefix_under_which_the_network_is_is_removed(prefix: str, tmp_path: Path) -> None:
    beside = {"criterion.weight": torch.ones(10), "val_acc.tp": torch.ones(10)}
    torch.save({"state_dict": under(prefix, STATE) | beside}, tmp_path / "last.ckpt")
    loaded = load_checkpoint(tmp_path / "last.ckpt")
    assert loaded.model.get_parameter("head.weight").equal(STATE["mlp_head.1.weight"])
    assert beside.keys() <= loaded.unused.keys()


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (torch.bfloat16, ", bfloat16 as float32"),
        (torch.float16, ", float16 as float32"),
        (torch.float64, ", float64 as float32"),
    ],
)
def test_weights_of_other_types_become_float32(dtype: torch.dtype, said: str, tmp_path: Path) -> None:
    torch.save({name: tensor.to(dtype) for name, tensor in STATE.items()}, tmp_path / "file.pth")
    loaded = load_checkpoint(tmp_path / "file.pth")
    head = loaded.model.get_parameter("head.weight")
    assert head.dtype == torch.float32
    assert head.equal(STATE["mlp_head.1.weight"].to(dtype).float())
    assert said in loaded.file.wrapping
