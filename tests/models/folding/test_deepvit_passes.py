"""DeepViT: each folding pass reaches its end state, changes no output, and leaves other networks as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.deepvit import DEEPVIT
from gmmvit_deploy.models.families.deepvit.folding import merge_scale_adjustment
from gmmvit_deploy.models.families.deepvit.spec import DeepViTSpec
from gmmvit_deploy.models.folding.fold import fold, fold_for_engines
from gmmvit_deploy.models.specs import MaskSpec
from tests.exact import assert_same_logits, exact_logits


def other_spec(**fields: object) -> DeepViTSpec:
    spec = replace(DEEPVIT.small(MaskSpec()), **fields)
    assert isinstance(spec, DeepViTSpec)
    return spec


@pytest.mark.parametrize("a", [0.3, 3.0])
def test_scale_adjustments_that_are_no_power_of_two(a: float) -> None:
    torch.manual_seed(0)
    model = model_from_spec(other_spec(scale_adjustment=a)).eval().requires_grad_(False).double()
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    expected = model(x)
    assert merge_scale_adjustment(model)
    assert_same_logits(model(x), expected)


def test_heads_too_wide_for_a_fused_kernel_keep_their_mixing() -> None:
    plain = fold(model_from_spec(other_spec(dim=264, heads=8, mlp_dim=8)).eval())
    assert fold_for_engines(plain).passes["widen_reattention"] == ()
    assert fold_for_engines(fold(model_from_spec(other_spec(dim=256, heads=8, mlp_dim=8)).eval())).passes[
        "widen_reattention"
    ] == ("blocks.1.attention",)


def test_odd_head_dims_are_padded() -> None:
    head_dim = 33
    torch.manual_seed(0)
    plain = fold(model_from_spec(other_spec(dim=12 * head_dim, heads=12)).eval())
    engine = fold_for_engines(plain)
    assert engine.passes["pad_heads"] == ("blocks.0.attention", "blocks.1.attention")
    assert [block.attention.out.in_features for block in engine.model.blocks] == [12 * 40] * 2  # type: ignore[union-attr]
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    assert_same_logits(exact_logits(engine.model, x), exact_logits(plain.model, x))
