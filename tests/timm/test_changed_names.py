"""Files whose tensors have other names than the network: a classifier that training replaced, and older names.

Each file that is loaded gives the logits of the network that wrote it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

from gmmvit_deploy.checkpoints.loading import LoadedCheckpoint, load_checkpoint
from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.sources.hints import LoadHints
from tests.documented import PAGES, blocks

pytestmark = pytest.mark.integration

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3}
SWIN = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 24, "depths": [1, 1], "num_heads": [2, 4]}
SWIN_NAME = "swin_tiny_patch4_window7_224"


def dropout_before(features: int) -> nn.Module:
    return nn.Sequential(nn.Dropout(0.5), nn.Linear(features, 3))


def with_head(name: str, place: tuple[str, ...], head: Callable[[int], nn.Module], **arguments: Any) -> nn.Module:
    """Build timm's network, replace its classifiers, and draw all weights."""
    torch.manual_seed(0)
    network = timm.create_model(name, **arguments)
    for path in place:
        features = network.get_submodule(path).in_features
        parent, _, last = path.rpartition(".")
        setattr(network.get_submodule(parent), last, head(features))
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    return network.eval()


def require_equal_logits(loaded: LoadedCheckpoint, network: nn.Module) -> None:
    images = torch.randn(2, 3, *loaded.spec.image_shape, dtype=torch.float64)
    with torch.inference_mode():
        logits = loaded.model.double()(images)
        expected = network.double()(images)
    if isinstance(expected, tuple):
        expected = (expected[0] + expected[1]) / 2
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "place", "arguments"),
    [
        ("vit_tiny_patch16_224", ("head",), VIT),
        (SWIN_NAME, ("head.fc",), SWIN),
        ("deit_tiny_distilled_patch16_224", ("head", "head_dist"), VIT),
        ("test_resnet", ("fc",), {}),
    ],
    ids=["vit", "swin", "two heads", "resnet"],
)
def test_the_only_linear_layer_is_the_classifier(
    tmp_path: Path, name: str, place: tuple[str, ...], arguments: dict[str, Any]
) -> None:
    network = with_head(name, place, dropout_before, **arguments)
    torch.save(network.state_dict(), tmp_path / "net.pth")
    size = None if arguments else 32
    loaded = load_checkpoint(tmp_path / "net.pth", LoadHints(model=name, model_args=arguments, image_size=size))
    assert loaded.taken_from["classifier"].startswith(f"{place[0]}.1, the only linear layer in place of {place[0]}")
    require_equal_logits(loaded, network)


@pytest.mark.parametrize("hidden", [None, 12])
def test_the_linear_layer_of_torchvisions_network(tmp_path: Path, hidden: int | None) -> None:
    """A tutorial replaces ``heads``, or with a hidden layer only ``heads.head``, which reads the features."""
    torch.manual_seed(0)
    network = pytest.importorskip("torchvision").models.VisionTransformer(
        image_size=16, patch_size=8, num_layers=1, num_heads=3, hidden_dim=24, mlp_dim=48, representation_size=hidden
    )
    if hidden is None:
        network.heads = nn.Linear(24, 3)
    else:
        network.heads.head = dropout_before(hidden)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    torch.save(network.state_dict(), tmp_path / "net.pth")
    hints = LoadHints(model="torchvision:VisionTransformer", model_args={"num_heads": 3})
    loaded = load_checkpoint(tmp_path / "net.pth", hints)
    require_equal_logits(loaded, network.eval())
    loaded.model.outputs = ("logits", "features")
    head = (network.heads if hidden is None else network.heads.head).double()
    with torch.inference_mode():
        logits, features = loaded.model.answers(torch.randn(2, 3, 16, 16, dtype=torch.float64))
        torch.testing.assert_close(head(features), logits, rtol=1e-12, atol=1e-12)


def test_a_classifier_of_several_layers_needs_its_class(tmp_path: Path) -> None:
    network = with_head(
        "vit_tiny_patch16_224",
        ("head",),
        lambda features: nn.Sequential(nn.Linear(features, 8), nn.GELU(), nn.Linear(8, 3)),
        **VIT,
    )
    torch.save(network.state_dict(), tmp_path / "net.pth")
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path / "net.pth", LoadHints(model="vit_tiny_patch16_224", model_args=VIT))
    assert "the file has head.0.weight (8, 24), head.2.weight (3, 8) in its place" in str(caught.value)
    assert "type --model FILE.py:CLASS" in caught.value.hint
    page = PAGES / "models" / "timm.md"
    (example,) = (block for block in blocks(page, page.read_text(encoding="utf-8")) if block.language == "python")
    (tmp_path / "net.py").write_text(example.text, encoding="utf-8")
    hints = LoadHints(model=f"{tmp_path / 'net.py'}:Net", model_args=VIT, image_size=32, channels=3)
    require_equal_logits(load_checkpoint(tmp_path / "net.pth", hints), network)


def beside(folder: Path, prefix: str, layer: str, head: nn.Module | None = None) -> nn.Module:
    """Write a ViT under a prefix, with its classifier beside it, or with another head in its place."""
    network = with_head("vit_tiny_patch16_224", (), dropout_before, num_classes=3, **VIT)
    state = {f"{prefix}.{k}": t for k, t in network.state_dict().items() if not k.startswith("head.")}
    state |= {f"{layer}.{key}": tensor for key, tensor in (head or network.get_submodule("head")).state_dict().items()}
    torch.save({"state_dict": {**state, "criterion.weight": torch.ones(3)}}, folder / "net.pth")
    return network


@pytest.mark.parametrize(
    ("prefix", "layer"), [("backbone", "classifier"), ("model.encoder", "model.head"), ("net.vit.model", "net.linear")]
)
def test_a_classifier_beside_the_network(tmp_path: Path, prefix: str, layer: str) -> None:
    network = beside(tmp_path, prefix, layer)
    loaded = load_checkpoint(tmp_path / "net.pth", LoadHints(model="vit_tiny_patch16_224", model_args=VIT))
    assert f"{layer.removeprefix('model.')}, the only linear layer beside the" in loaded.taken_from["classifier"]
    assert f"network under '{prefix.removeprefix('model.')}.'" in loaded.file.wrapping
    require_equal_logits(loaded, network)
    with pytest.raises(CheckpointError, match=rf"under '{prefix.removeprefix('model.')}\.'.* keys do not fit"):
        load_checkpoint(tmp_path / "net.pth", LoadHints(model="vit_small_patch16_224"))


@pytest.mark.parametrize("place", [(), ("head.fc",)], ids=["classifier of timm", "with Dropout"])
@pytest.mark.parametrize("stated", [True, False], ids=["by the file", "by the user"])
def test_older_names_of_a_swin(tmp_path: Path, place: tuple[str, ...], *, stated: bool) -> None:
    """Timm before 0.9 and Microsoft's code merge patches at the end of a stage, and have the classifier ``head``."""
    network = with_head(SWIN_NAME, place, dropout_before, num_classes=3, **SWIN)
    names = {"layers.1.downsample": "layers.0.downsample", "head.fc": "head"}
    older = {}
    for key, tensor in network.state_dict().items():
        place_of = next((new for new in names if key.startswith(f"{new}.")), None)
        older[key if place_of is None else key.replace(place_of, names[place_of])] = tensor
    older["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(16, 16, dtype=torch.long)
    content: dict[str, Any] = {"model": older}
    if stated:
        options = {"crop_pct": None, "mean": None, "std": None, "interpolation": "", "input_size": None}
        content["args"] = Namespace(model=SWIN_NAME, model_kwargs=SWIN, **options)
    torch.save(content, tmp_path / "net.pth")
    hints = LoadHints() if stated else LoadHints(model=SWIN_NAME, model_args=SWIN)
    loaded = load_checkpoint(tmp_path / "net.pth", hints)
    assert loaded.taken_from["names of tensors"].startswith("the present ones of timm")
    require_equal_logits(loaded, network)


def test_tensors_of_another_size_are_not_resampled(tmp_path: Path) -> None:
    """Timm's own function would resample the table of position biases for the window that the user typed."""
    network = timm.create_model(SWIN_NAME, num_classes=3, **SWIN)
    older = {key.replace("layers.1.downsample", "layers.0.downsample"): t for key, t in network.state_dict().items()}
    torch.save(older, tmp_path / "net.pth")
    with pytest.raises(CheckpointError, match=r"relative_position_bias_table has shape \(49, 2\), expected \(225, 2\)"):
        load_checkpoint(tmp_path / "net.pth", LoadHints(model=SWIN_NAME, model_args={**SWIN, "window_size": 8}))


def test_deit3_names_of_the_layer_scales(tmp_path: Path) -> None:
    arguments = {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 5}
    network = with_head("deit3_small_patch16_224", (), dropout_before, **arguments)
    state = network.state_dict()
    older = {key.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): state[key] for key in state}
    assert older.keys() != state.keys()
    torch.save({"model": older}, tmp_path / "net.pth")
    loaded = load_checkpoint(tmp_path / "net.pth", LoadHints(model="deit3_small_patch16_224", model_args=arguments))
    require_equal_logits(loaded, network)
