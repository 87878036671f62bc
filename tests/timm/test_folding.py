"""Folding of timm's distilled heads, and DeiT III's names."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.families import model_from_spec
from gmmvit_deploy.families.timm.spec import TimmSpec
from gmmvit_deploy.folding.fold import fold
from gmmvit_deploy.sources.hints import LoadHints
from gmmvit_deploy.specs import MaskSpec

SMALL: dict[str, dict[str, Any]] = {
    "deit_tiny_distilled_patch16_224": {"img_size": 32, "patch_size": 16, "embed_dim": 24, "depth": 1, "num_heads": 2},
    "pit_ti_distilled_224": {"img_size": 64},
    "levit_128s": {},
}


@pytest.mark.parametrize("name", SMALL)
def test_two_heads_become_one(name: str) -> None:
    torch.manual_seed(0)
    size = SMALL[name].get("img_size", 224)
    args = {**SMALL[name], "num_classes": 5}
    model = model_from_spec(
        TimmSpec(architecture=name, model_args=args, image_size=size, classes=5, mask=MaskSpec())
    ).eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.rand(tensor.shape))
    folded = fold(model)
    assert folded.passes["join_distilled_heads"] == ("network.head", "network.head_dist")
    images = torch.randn(2, 3, size, size, dtype=torch.float64)
    with torch.inference_mode():
        expected, logits = copy.deepcopy(model).double()(images), copy.deepcopy(folded.model).double()(images)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    assert not hasattr(folded.model.network.head_dist, "weight")
    assert fold(folded.model).passes["join_distilled_heads"] == ()


def test_a_single_head_stays() -> None:
    model = model_from_spec(
        TimmSpec(
            architecture="deit_tiny_patch16_224",
            model_args={"img_size": 32, "embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 5},
            image_size=32,
            classes=5,
            mask=MaskSpec(),
        )
    )
    assert fold(model.eval()).passes["join_distilled_heads"] == ()


def test_deit3_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    args = {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 5}
    model = timm.create_model("deit3_small_patch16_224", pretrained=False, **args).eval().double()
    state = {key: torch.randn(value.shape) for key, value in model.state_dict().items()}
    model.load_state_dict(state)
    path = tmp_path / "deit3.pth"
    torch.save(
        {"model": {k.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): v for k, v in state.items()}},
        path,
    )
    loaded = load_checkpoint(path, LoadHints(model="deit3_small_patch16_224", model_args=args))
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model.double()(images), model(images), rtol=1e-12, atol=1e-12)
