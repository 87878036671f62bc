from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gmmvit_deploy.checkpoints.loading import load_checkpoint, released_state_dict
from gmmvit_deploy.errors import CheckpointError, InputError
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.specs import ModelSpec
from tests.conftest import GOLDEN, MANIFEST, Golden
from tests.golden_files import tensors_of
from tests.models.families.test_families import cait_specs, pit_specs, swin_specs, t2t_specs, vit_specs

State = dict[str, torch.Tensor]


def released_state(name: str = "vit_gmm") -> State:
    return tensors_of(name)


def saved(folder: Path, state: Any, name: str = "model.pth") -> Path:
    torch.save(state, folder / name)
    return folder / name


def test_what_we_write_is_what_the_released_code_writes(each_golden: Golden) -> None:
    state = released_state(each_golden.name)
    loaded = load_checkpoint(each_golden.path, each_golden.hints)
    written = released_state_dict(loaded.model)
    assert (
        set(written) == set(state) - set(loaded.unused) - {name for name in state if name.startswith("module.")}
        or each_golden.name == "vit_gmm_img64"
    )
    for name, tensor in written.items():
        stored = state[name] if name in state else state[f"module.{name}"]
        assert tensor.shape == stored.shape, name
        assert tensor.equal(stored), name


def test_a_closed_form_leaves_a_stored_base_unused() -> None:
    loaded = load_checkpoint(GOLDEN / "vit_gmm_256_tokens.pth", LoadHints(closed_form=True))
    assert any(name.endswith("fn.mask.mask") for name in loaded.unused)


_BLOCK0, _BLOCK1 = "transformer.layers.0.0.fn.mask.alpha", "transformer.layers.1.0.fn.mask.alpha"
_INDEX = "layers.0.blocks.0.attn.relative_position_index"


@pytest.mark.parametrize(
    ("name", "key", "tensor", "message"),
    [
        ("vit_gmm", "transformer.layers.1.1.norm.bias", None, r"has no tensor transformer\.layers\.1\.1\.norm\.bias"),
        ("vit_gmm", "to_patch_embedding.1.weight", None, "unknown architecture"),
        ("vit_gmm", _BLOCK1, torch.zeros(5, 3), r"has shape \(5, 3\), expected \(5, 3, 1, 1\)"),
        ("vit_gmm", "pos_embedding", torch.zeros(1, 63, 48), "square grid"),
        ("swin_gmm", _INDEX, torch.zeros(16, 16), "expected torch.int64"),
        ("swin_gmm", "layers.0.blocks.1.attn_mask", torch.zeros(4, 16, 16), r"expected \(16, 16, 16\)"),
        ("swin_plain", "layers.0.blocks.0.attn.mask.mask", torch.zeros(16, 16), "element-wise mask"),
    ],
)
def test_keys_that_do_not_fit_are_named(
    name: str, key: str, tensor: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    state = released_state(name) | {key: tensor}
    with pytest.raises(InputError, match=message) as caught:
        load_checkpoint(saved(tmp_path, {key: value for key, value in state.items() if value is not None}))
    assert "model.pth" in str(caught.value)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"conv1.weight": torch.zeros(64, 3, 7, 7), "fc.bias": torch.zeros(10)})
    with pytest.raises(CheckpointError, match=r"the first keys of the file are conv1\.weight") as caught:
        load_checkpoint(path)
    assert "--model with timm's name of the architecture" in caught.value.hint


@pytest.mark.parametrize("name", ["vit_gmm", "swin_gmm", "cait_gmm", "pit_gmm", "t2t_gmm"])
@pytest.mark.parametrize("form", ["shared", "closed"])
def test_shared_and_closed_masks(name: str, form: str, tmp_path: Path) -> None:
    state = released_state(name)
    for key in list(state):
        if form == "shared" and key.endswith((".mask.alpha", ".mask.sigma")):
            state[key] = state[key][:, :1].clone()
        if form == "closed" and key.endswith(".mask.mask"):
            del state[key]
    config = MANIFEST[name]["config"]
    heads = config.get("heads", config.get("num_heads"))
    hints = LoadHints(
        heads=heads[0] if isinstance(heads, list) else heads, closed_form=True if form == "closed" else None
    )
    loaded = load_checkpoint(saved(tmp_path, state), hints)
    assert (loaded.spec.mask.shared, loaded.spec.mask.closed_form) == (form == "shared", form == "closed")
    assert loaded.model(torch.zeros(1, 3, 32, 32)).isfinite().all()


@pytest.mark.nightly
@given(
    spec=st.one_of(vit_specs(), swin_specs(), cait_specs(), pit_specs(), t2t_specs()),
    channels=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=120, deadline=None)
def test_spec_and_weights_survive(spec: ModelSpec, channels: int, seed: int) -> None:
    """Any model we can build, saved as the released code saves it, is read back as itself."""
    torch.manual_seed(seed)
    spec = replace(spec, channels=channels)
    model = model_from_spec(spec).eval()
    heads = spec.heads[0] if isinstance(spec.heads, tuple) else spec.heads
    # The names of a plain ViT and a plain CaiT are also those of vit-pytorch.
    closed_form = True if spec.mask.closed_form else None
    source = "spt-lsa" if spec.mask.kind == "plain" else None
    hints = LoadHints(heads=heads, channels=channels, closed_form=closed_form, source=source)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pth"
        torch.save({"model_state_dict": released_state_dict(model)}, path)
        loaded = load_checkpoint(path, hints)
    # With a single head, shared and separate masks look the same in a file.
    alone = set(spec.heads if isinstance(spec.heads, tuple) else (spec.heads,)) == {1}
    assert loaded.spec == replace(spec, mask=replace(spec.mask, shared=spec.mask.shared and not alone))
    expected = model.state_dict()
    restored = loaded.model.state_dict()
    assert restored.keys() == expected.keys()
    assert all(restored[name].equal(expected[name]) for name in expected)
