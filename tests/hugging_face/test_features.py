"""Features of transformers' networks: what the classifier reads, or the pooled output of a backbone.

Expected are transformers' own values, of the model that ``from_pretrained`` builds from the folder.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
import transformers

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import GmmvitError, InputError
from gmmvit_deploy.exporting.bundle_from_checkpoint import require_outputs
from gmmvit_deploy.models.families import spec_from_json
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.specs import spec_to_json
from tests.hugging_face.folders import ARCHITECTURES, BACKBONES, IMAGES_AND_TEXTS, built, saved

pytestmark = pytest.mark.integration

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
EXACT = 1e-12


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["vit", "beit", "swin", "dinov2", "vit_msn"])
@torch.no_grad()
def test_features_of_a_classifier_are_what_it_reads(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / name)
    network = getattr(transformers, ARCHITECTURES[name][0]).from_pretrained(folder).double().eval()
    logits = network(IMAGES).logits
    network.classifier = nn.Identity()
    expected = network(IMAGES).logits
    loaded = load_checkpoint(folder)
    loaded.model.outputs = ("logits", "features")
    require_outputs(loaded)
    given = copy.deepcopy(loaded.model).double().answers(IMAGES)
    assert expected.shape == (3, {"swin": 64, "dinov2": 64}.get(name, 32))
    torch.testing.assert_close(given, (logits, expected), rtol=0, atol=EXACT)


CASES = {
    "DINO without a pooler": ("vit_backbone", {"add_pooling_layer": False}, "cls", 32),
    "the class token before the pooler": ("vit_backbone", {}, "cls", 32),
    "the pooler": ("vit_backbone", {}, "pooler", 32),
    "the mean of Swin": ("swin_backbone", {}, None, 64),
    "DINOv2": ("dinov2_backbone", {}, None, 32),
    "DINOv2 with registers": ("dinov2_registers_backbone", {}, None, 32),
    "DINOv3": ("dinov3_backbone", {}, None, 32),
    "DINOv3 with a gated mlp": ("dinov3_gated_backbone", {}, None, 32),
    "SigLIP": ("siglip_backbone", {}, None, 32),
    "CLIP": ("clip_backbone", {}, None, 32),
    "no pooled output": ("vit_msn_backbone", {}, "cls", 32),
}
"""Name of a test → (test folder, arguments of its class, ``--set pool``, width of the features)."""


@pytest.mark.first(2)
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_features_of_a_backbone_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    name, arguments, pool, width = CASES[case]
    folder = saved(name, tmp_path / name, built(name, arguments))
    network = getattr(transformers, BACKBONES[name][0]).from_pretrained(folder, **arguments).double().eval()
    output = network(IMAGES)
    expected = output.last_hidden_state[:, 0] if pool == "cls" else output.pooler_output
    loaded = load_checkpoint(folder, LoadHints(only_features=True, pool=pool))
    require_outputs(loaded)
    assert (loaded.model.outputs, loaded.spec.classes, loaded.images.labels) == (("features",), 0, None)
    given = copy.deepcopy(loaded.model).double()(IMAGES)
    assert expected.shape == (3, width)
    torch.testing.assert_close(given, expected, rtol=0, atol=EXACT)
    assert spec_from_json(json.loads(json.dumps(spec_to_json(loaded.spec)))) == loaded.spec
    folded = fold(loaded.model).model  # merged weights are rounded to float32
    torch.testing.assert_close(folded.double()(IMAGES), expected, rtol=0, atol=1e-6)
    left_out = {name for name in loaded.unused if name.startswith("pooler.")}
    assert left_out == ({"pooler.dense.weight", "pooler.dense.bias"} if "before" in case else set())


@pytest.mark.parametrize("name", ["clip_model", "siglip_model", "clip_projected"])
@torch.no_grad()
def test_features_of_a_network_of_images_and_texts_are_its_image_embeddings(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / name)
    architecture = {**BACKBONES, **IMAGES_AND_TEXTS}[name][0]
    network = getattr(transformers, architecture).from_pretrained(folder).double().eval()
    expected = network(IMAGES).image_embeds if name == "clip_projected" else network.get_image_features(IMAGES)[1]
    loaded = load_checkpoint(folder, LoadHints(only_features=True))
    require_outputs(loaded)
    assert expected.shape == (3, 32 if name == "siglip_model" else 16)
    torch.testing.assert_close(loaded.model.double()(IMAGES), expected, rtol=0, atol=EXACT)
    left_out = {key.partition(".")[0] for key in loaded.unused}
    assert ("text_model" in left_out) == (name in IMAGES_AND_TEXTS)


BARE = {"add_pooling_layer": False}


@pytest.mark.parametrize(
    ("name", "arguments", "message", "hint"),
    [
        ("vit_backbone", BARE, "which a linear layer that the weights lack", "--set pool=cls"),
        ("ijepa_backbone", {}, "transformers computes no pooler_output", "no class token either"),
        ("resnet_backbone", {}, r"expected features of shape \(2, 'D'\) .* got \(2, 8, 1, 1\)", "not a vector"),
    ],
)
def test_features_that_the_folder_does_not_state_are_asked_for(
    name: str, arguments: dict[str, bool], message: str, hint: str, tmp_path: Path
) -> None:
    folder = saved(name, tmp_path / name, built(name, arguments))
    with pytest.raises(GmmvitError, match=message) as caught:
        load_checkpoint(folder, LoadHints(only_features=True))
    assert str(caught.value).startswith(str(folder))
    assert re.search(hint, caught.value.hint)


def test_a_distilled_network_has_no_single_features(tmp_path: Path) -> None:
    loaded = load_checkpoint(saved("deit_with_teacher", tmp_path / "deit"))
    loaded.model.outputs = ("features",)
    with pytest.raises(InputError, match=r"distilled: network.cls_classifier and network.distillation_class") as caught:
        require_outputs(loaded)
    assert str(caught.value).startswith(str(tmp_path / "deit"))
    assert "leave --outputs out" in caught.value.hint
