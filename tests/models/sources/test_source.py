"""A source whose tensors have another form than ours, and files that several sources recognise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gmmvit_deploy.checkpoints import loading
from gmmvit_deploy.checkpoints.loading import load_checkpoint, released_state_dict
from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models import families
from gmmvit_deploy.models.families import family_named, model_from_spec
from gmmvit_deploy.models.families.family import small_mask
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.shapes import Shapes, asked_image
from gmmvit_deploy.models.sources.source import CheckpointSource, Conversion
from gmmvit_deploy.models.specs import ModelSpec

VIT = family_named("vit")
SPEC = VIT.small(small_mask("gmm"))
STACKED = "blocks.{}.attention.qkv.weight"


def _stacked(*parts: Tensor) -> Tensor:
    return torch.cat(parts)


def _tensors(spec: ModelSpec) -> Mapping[str, str | Conversion]:
    """As the released code names them, but q, k and v each a map of its own."""
    origins: dict[str, str | Conversion] = dict(VIT.sources[0].tensors(spec))
    for block in range(2):
        keys = tuple(f"separate.{block}.{part}" for part in "qkv")
        origins[STACKED.format(block)] = Conversion(keys=keys, convert=_stacked)
    return origins


def _spec(shapes: Shapes, hints: LoadHints) -> ModelSpec:
    image_size, channels = asked_image(shapes.source, hints)
    return replace(SPEC, image_size=image_size, channels=channels)


SEPARATE = CheckpointSource(
    name="a library with separate maps",
    signature=(r"to_patch_embedding\.1\.weight$", r"transformer\.layers\.", r"separate\.0\.q$"),
    spec=_spec,
    tensors=_tensors,
)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    """A small ViT, with `SEPARATE` among its family's sources."""
    with_source = replace(VIT, sources=(*VIT.sources, SEPARATE))
    others = tuple(with_source if family is VIT else family for family in families.FAMILIES)
    monkeypatch.setattr(families, "FAMILIES", others)
    monkeypatch.setattr(loading, "FAMILIES", others)
    return model_from_spec(SPEC).eval()


def _state(model: Model) -> dict[str, Tensor]:
    released = released_state_dict(model)
    for block in range(2):
        stacked = released.pop(f"transformer.layers.{block}.0.fn.to_qkv.weight")
        parts = zip("qkv", stacked.chunk(3), strict=True)
        released |= {f"separate.{block}.{part}": weight.clone() for part, weight in parts}
    return released


def _saved(state: dict[str, Tensor], folder: Path) -> Path:
    torch.save(state, folder / "model.pth")
    return folder / "model.pth"


HINTS = LoadHints(image_size=16, channels=3)


def test_a_conversion_makes_our_tensor_and_the_longest_signature_decides(model: Model, tmp_path: Path) -> None:
    loaded = load_checkpoint(_saved(_state(model), tmp_path), HINTS)
    assert loaded.unused == {}
    assert all(tensor.equal(model.state_dict()[name]) for name, tensor in loaded.model.state_dict().items())


def test_what_the_source_asks_for_is_an_error_without_it(model: Model, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tensor of this file shows") as caught:
        load_checkpoint(_saved(_state(model), tmp_path))
    assert "--image-size" in caught.value.hint
    assert "--set channels" in caught.value.hint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"separate.0.k": torch.zeros(4, 32)}, r"separate\.0\.q, separate\.0\.k, .* is converted to shape \(68, 32\)"),
        ({"separate.1.v": torch.zeros(32, 7)}, r"cannot convert .* to a tensor of the model: "),
        ({"separate.2.q": torch.zeros(1)}, r"unknown key separate\.2\.q"),
        ({"separate.1.v": None}, r"the file has no tensor separate\.1\.v"),
        ({"mlp_head.0.bias": torch.zeros(7)}, r"mlp_head\.0\.bias has shape \(7,\), expected \(32,\)"),
    ],
    ids=["another shape", "cannot be stacked", "unknown", "missing", "not converted"],
)
def test_every_key_is_accounted_for(
    change: dict[str, Tensor | None], message: str, model: Model, tmp_path: Path
) -> None:
    state = {name: tensor for name, tensor in {**_state(model), **change}.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(_saved(state, tmp_path), HINTS)
