"""Weights files of bundles, and hints about the images of a checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
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
from gmmvit_deploy.models.specs import MaskSpec, spec_to_json
from tests.conftest import golden
from tests.models.folding.test_passes import small
from tests.parity.faults import with_file

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
