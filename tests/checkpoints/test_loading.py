from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.checkpoints.loading import load_checkpoint, released_state_dict
from gmmvit_deploy.checkpoints.reading import MODEL_METADATA_KEY
from gmmvit_deploy.checkpoints.weights import model_from_bundle
from gmmvit_deploy.errors import BundleError, CheckpointError, InputError
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.vit import ViTSpec
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.specs import MaskSpec, ModelSpec, spec_to_json
from tests.conftest import GOLDEN, MANIFEST, Golden, golden
from tests.golden_files import tensors_of
from tests.models.families.test_families import cait_specs, pit_specs, swin_specs, t2t_specs, vit_specs
from tests.models.folding.test_passes import small
from tests.parity.faults import with_file

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


# ---- weights files of bundles, and hints about the images of a checkpoint --------------------------------------------


SPEC = small(MaskSpec(kind="gmm", kernels=2)).spec


def released(path: Path, spec: ViTSpec) -> Path:
    torch.manual_seed(1)
    torch.save(released_state_dict(model_from_spec(spec)), path)
    return path


@pytest.mark.nightly
def test_export_from_a_bundles_weights_gives_the_same_network(
    tensor_bundles: dict[str, Bundle], tmp_path: Path
) -> None:
    first = tensor_bundles["swin_gmm"]
    again = bundle_from_checkpoint(
        first.weights_path, tmp_path / "again", ExportOptions(input_kind="tensor", max_batch=8)
    )
    assert again.manifest.spec == first.manifest.spec
    assert again.weights_path.read_bytes() == first.weights_path.read_bytes()
    assert again.golden()[1].tobytes() == first.golden()[1].tobytes()
    assert again.manifest.masks == first.manifest.masks


@pytest.mark.parametrize("metadata", ["{", "[]", "{}"])
def test_a_spec_that_is_broken(metadata: str, tmp_path: Path) -> None:
    save_file(model_from_spec(SPEC).state_dict(), tmp_path / "w.safetensors", metadata={MODEL_METADATA_KEY: metadata})
    with pytest.raises(InputError):
        load_checkpoint(tmp_path / "w.safetensors")


def with_weights(bundle: Bundle, out: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> Bundle:
    return with_file(bundle, out, "weights.safetensors", save(tensors, metadata=metadata))


def test_tensors_that_do_not_fit_the_spec_are_listed(bundle: Bundle, tmp_path: Path) -> None:
    tensors = load_file(bundle.weights_path)
    del tensors["head.bias"]
    tensors["stowaway"] = torch.zeros(3)
    tensors["head.weight"] = torch.zeros(10, 7)
    tensors["head_norm.weight"] = tensors["head_norm.weight"].int()
    broken = with_weights(bundle, tmp_path / "bundle", tensors, {})
    with pytest.raises(BundleError) as caught:
        model_from_bundle(broken.manifest, broken.weights_path)
    assert "4 tensors do not fit the vit model that the manifest describes" in str(caught.value)
    for line in (
        "the file has no tensor head.bias",
        "unknown key stowaway (3,)",
        "head.weight has shape (10, 7), expected (10, 48)",
        "head_norm.weight is torch.int32, expected torch.float32",
    ):
        assert line in str(caught.value)


def test_weights_of_other_heads_are_not_the_manifests(bundle: Bundle, tmp_path: Path) -> None:
    """All names and shapes fit, but the answers would differ."""
    spec = replace(bundle.manifest.spec, mask=replace(bundle.manifest.spec.mask, closed_form=False))
    other = replace(spec, heads=6, head_dim=spec.dim // 6) if isinstance(spec, ViTSpec) else spec
    metadata = {MODEL_METADATA_KEY: json.dumps(spec_to_json(other))}
    broken = with_weights(bundle, tmp_path / "bundle", load_file(bundle.weights_path), metadata)
    with pytest.raises(BundleError, match=r"the weights belong to .*heads=6.* the manifest describes .*heads=3"):
        model_from_bundle(broken.manifest, broken.weights_path)


class TestImagesOfReleasedCheckpoints:
    def test_are_rgb_unless_the_user_gives_the_channels(self, tmp_path: Path) -> None:
        assert load_checkpoint(released(tmp_path / "rgb.pth", SPEC)).spec.channels == 3
        grey = released(tmp_path / "grey.pth", replace(SPEC, channels=1))
        with pytest.raises(CheckpointError, match=r"takes 16 values per patch.*expected 3·p·p") as caught:
            load_checkpoint(grey)
        assert "--set channels=1 or --set channels=4" in caught.value.hint
        assert load_checkpoint(grey, LoadHints(channels=1)).spec == replace(SPEC, channels=1)

    @pytest.mark.parametrize("name", ["swin_plain", "pit_gmm", "t2t_gmm"])
    def test_channels_are_read_off_convolutions_and_unfolds(self, name: str) -> None:
        case = golden(name)
        with pytest.raises(CheckpointError, match=r"--set channels=1 contradicts the file: its tensors show 3"):
            load_checkpoint(case.path, replace(case.hints, channels=1))
