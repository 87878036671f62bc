"""DeepViT: each folding pass reaches its end state, changes no output, and leaves other networks as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.deepvit import DEEPVIT
from gmmvit_deploy.models.families.deepvit.folding import merge_head_norm, merge_scale_adjustment, merge_stem_norms
from gmmvit_deploy.models.families.deepvit.model import ReAttention
from gmmvit_deploy.models.families.deepvit.spec import DeepViTSpec
from gmmvit_deploy.models.families.deepvit.wide_heads import widen_reattention
from gmmvit_deploy.models.folding.fold import FoldedModel, fold, fold_for_engines
from gmmvit_deploy.models.folding.head_padding import pad_heads
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.scores.attention import AttentionScores
from gmmvit_deploy.models.scores.heads import HeadMixing
from gmmvit_deploy.models.scores.masks import ElementwiseMask
from gmmvit_deploy.models.specs import MaskSpec
from tests.conftest import golden
from tests.exact import assert_same_logits, exact_logits
from tests.models.folding.test_family_passes import trained as trained_of

PASSES = (merge_head_norm, merge_scale_adjustment, merge_stem_norms)


def trained(name: str = "deepvit_cnn_scaled") -> Model:
    case = golden(name)
    return load_checkpoint(case.path, case.hints).model.requires_grad_(False)


def images(name: str = "deepvit_cnn_scaled") -> torch.Tensor:
    return torch.from_numpy(golden(name).inputs).double()


def other_spec(**fields: object) -> DeepViTSpec:
    spec = replace(DEEPVIT.small(MaskSpec()), **fields)
    assert isinstance(spec, DeepViTSpec)
    return spec


def test_the_offset_acts_as_an_addition_to_every_weight() -> None:
    attention = ReAttention(
        dim=6, heads=2, scores=AttentionScores({}, {"mixing": HeadMixing(torch.eye(2))}), qkv_bias=True
    )
    attention = attention.double().requires_grad_(False)
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    plain, offsets = attention(x), torch.tensor([0.25, -2.0], dtype=torch.float64)
    value = attention.qkv(x)[..., 12:].unflatten(-1, (2, 3))
    added = (offsets[:, None] * value.sum(dim=1, keepdim=True)).flatten(2)
    attention.mean_factors = 5 * offsets[:, None]
    torch.testing.assert_close(attention(x), plain + added @ attention.out.weight.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("a", [0.3, 3.0])
def test_scale_adjustments_that_are_no_power_of_two(a: float) -> None:
    torch.manual_seed(0)
    model = model_from_spec(other_spec(scale_adjustment=a)).eval().requires_grad_(False).double()
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    expected = model(x)
    assert merge_scale_adjustment(model)
    assert_same_logits(model(x), expected)


def test_training_mode_is_refused() -> None:
    with pytest.raises(FoldError, match="training mode"):
        merge_head_norm(trained().train())


def test_a_step_for_each_pair_of_tokens_is_refused() -> None:
    model = trained()
    model.blocks[3].attention.scores.after["mask"] = ElementwiseMask(torch.rand(65, 65))  # type: ignore[index, union-attr]
    with pytest.raises(FoldError, match=r"blocks\.3\.attention\.scores\.after\.mask: expected a number for each head"):
        merge_head_norm(model)


def test_other_families_have_nothing_to_merge() -> None:
    for name in ("vit_gmm", "cait_plain"):
        model = trained_of(name)
        assert [run(model) for run in (*PASSES, widen_reattention)] == [(), (), (), ()]


# ---- GPU engines ---------------------------------------------------------------------------------------------------


def folded(name: str) -> FoldedModel:
    return fold(trained(name))


def test_heads_too_wide_for_a_fused_kernel_keep_their_mixing() -> None:
    plain = fold(model_from_spec(other_spec(dim=264, heads=8, mlp_dim=8)).eval())
    assert fold_for_engines(plain).passes["widen_reattention"] == ()
    assert fold_for_engines(fold(model_from_spec(other_spec(dim=256, heads=8, mlp_dim=8)).eval())).passes[
        "widen_reattention"
    ] == ("blocks.1.attention",)


@pytest.mark.parametrize("head_dim", [33, 35])
def test_odd_head_dims_are_padded(head_dim: int) -> None:
    torch.manual_seed(0)
    plain = fold(model_from_spec(other_spec(dim=12 * head_dim, heads=12)).eval())
    engine = fold_for_engines(plain)
    assert engine.passes["pad_heads"] == ("blocks.0.attention", "blocks.1.attention")
    assert [block.attention.out.in_features for block in engine.model.blocks] == [12 * 40] * 2  # type: ignore[union-attr]
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    assert_same_logits(exact_logits(engine.model, x), exact_logits(plain.model, x))


def test_widening_waits_for_folding() -> None:
    with pytest.raises(FoldError, match="run merge_head_norm before widen_reattention"):
        widen_reattention(trained())


def test_padding_before_widening_is_right_as_well() -> None:
    plain = folded("deepvit_cnn_cleaned")
    engine = fold_for_engines(plain, [pad_heads, widen_reattention])
    x = images("deepvit_cnn_cleaned")
    assert_same_logits(exact_logits(engine.model, x), exact_logits(plain.model, x))
