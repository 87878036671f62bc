"""Features of transformers' networks: what the classifier reads, or the pooled output of a backbone.

Expected are transformers' own values, of the model that ``from_pretrained`` builds from the folder.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
import transformers

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.export.outputs import require_outputs
from tests.hugging_face.folders import ARCHITECTURES, saved

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
EXACT = 1e-12


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


def test_a_distilled_network_has_no_single_features(tmp_path: Path) -> None:
    loaded = load_checkpoint(saved("deit_with_teacher", tmp_path / "deit"))
    loaded.model.outputs = ("features",)
    with pytest.raises(InputError, match=r"distilled: network.cls_classifier and network.distillation_class") as caught:
        require_outputs(loaded)
    assert str(caught.value).startswith(str(tmp_path / "deit"))
    assert "leave --outputs out" in caught.value.hint
