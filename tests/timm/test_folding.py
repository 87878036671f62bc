"""Folding of timm's distilled heads and blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.timm.spec import TimmSpec
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.specs import MaskSpec, input_shape

pytestmark = pytest.mark.integration

SMALL: dict[str, dict[str, Any]] = {
    "deit_tiny_distilled_patch16_224": {"img_size": 32, "patch_size": 16, "embed_dim": 24, "depth": 1, "num_heads": 2},
    "pit_ti_distilled_224": {"img_size": 64},
    "levit_128s": {},
}


def require_same_answers(model: Any, folded: Any) -> None:
    images = torch.randn(2, *input_shape(model.spec), dtype=torch.float64)
    with torch.inference_mode():
        expected, answers = (copy.deepcopy(m).double().answers(images) for m in (model, folded))
    for answer, own in zip(answers, expected, strict=True):  # merged weights are rounded to float32
        torch.testing.assert_close(answer, own, rtol=0, atol=1e-6 * max(1.0, float(own.abs().max())))


@pytest.mark.first(1)
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
    # Both heads of LeViT read the same vector, which is the features.
    model.outputs = ("logits", "features") if name.startswith("levit") else ("logits",)
    folded = fold(model)
    assert folded.passes["join_distilled_heads"] == ("network.head", "network.head_dist")
    require_same_answers(model, folded.model)
    assert not hasattr(folded.model.network.head_dist, "weight")
    assert fold(folded.model).passes["join_distilled_heads"] == ()


def spec_of(name: str, mask: MaskSpec | None = None, **args: Any) -> TimmSpec:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
    return TimmSpec(architecture=name, model_args={**sizes, **args}, image_size=32, classes=5, mask=mask or MaskSpec())


def random_model(spec: TimmSpec) -> Any:
    torch.manual_seed(0)
    model = model_from_spec(spec).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) / max(1, parameter[0].numel()) ** 0.5)
    return model


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("name", "merged", "narrowed"),
    [
        ("vit_tiny_patch16_224", 0, 1),
        ("deit_tiny_distilled_patch16_224", 0, 1),
        ("vit_small_patch14_dinov2", 4, 1),
        ("vit_medium_patch16_reg4_gap_256", 4, 0),
        ("deit3_small_patch16_224", 4, 1),
        ("eva02_tiny_patch14_224", 0, 0),
    ],
)
def test_blocks_are_folded(name: str, merged: int, narrowed: int) -> None:
    model = random_model(spec_of(name))
    folded = fold(model)
    assert len(folded.passes["merge_linear_layer_scale"]) == merged
    assert len(folded.passes["narrow_class_token_block"]) == narrowed
    require_same_answers(model, folded.model)
    again = fold(folded.model).passes
    assert again["merge_linear_layer_scale"] == again["narrow_class_token_block"] == ()


def test_a_block_that_does_not_follow_the_rule_stays() -> None:
    model = random_model(spec_of("vit_small_patch14_dinov2"))
    block = model.network.blocks[0]
    block.ls1.forward = lambda x: x * block.ls1.gamma + x.mean(dim=1, keepdim=True)
    assert fold(model).passes["merge_linear_layer_scale"] == ()


def test_a_dead_decay_is_folded_away() -> None:
    decay = MaskSpec(kind="decay")
    model = random_model(spec_of("vit_tiny_patch16_224", decay))
    folded = fold(model)
    assert folded.passes["drop_dead_masks"] == ("network.blocks.1.attn.mask",)
    require_same_answers(model, folded.model)
    live = random_model(spec_of("vit_tiny_patch16_224", decay, global_pool="avg", class_token=False))
    assert fold(live).passes["drop_dead_masks"] == ()
