"""DeepViT: each folding pass reaches its end state, changes no output, and leaves other networks as they are."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.deepvit import DEEPVIT
from gmmvit_deploy.models.families.deepvit.folding import merge_head_norm, merge_scale_adjustment, merge_stem_norms
from gmmvit_deploy.models.families.deepvit.model import DeepViTBlock, ReAttention
from gmmvit_deploy.models.families.deepvit.spec import DeepViTSpec
from gmmvit_deploy.models.families.deepvit.wide_heads import WideReAttention, widen_reattention
from gmmvit_deploy.models.folding.fold import FoldedModel, engine_passes, fold, fold_for_engines
from gmmvit_deploy.models.folding.head_padding import pad_heads
from gmmvit_deploy.models.layers.batch_norm import BatchNorm
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.scores.attention import AttentionScores, attention_scores
from gmmvit_deploy.models.scores.heads import HeadMixing
from gmmvit_deploy.models.scores.masks import ElementwiseMask
from gmmvit_deploy.models.specs import MaskSpec
from tests.conftest import golden
from tests.exact import assert_same_logits, exact_logits
from tests.models.folding.test_family_passes import trained as trained_of

PASSES = (merge_head_norm, merge_scale_adjustment, merge_stem_norms)
NAMES = ("deepvit_patch", "deepvit_cnn_scaled", "deepvit_cnn_cleaned", "deepvit_ema_amp")


def trained(name: str = "deepvit_cnn_scaled") -> Model:
    case = golden(name)
    return load_checkpoint(case.path, case.hints).model.requires_grad_(False)


def images(name: str = "deepvit_cnn_scaled") -> torch.Tensor:
    return torch.from_numpy(golden(name).inputs).double()


def other_spec(**fields: object) -> DeepViTSpec:
    spec = replace(DEEPVIT.small(MaskSpec()), **fields)
    assert isinstance(spec, DeepViTSpec)
    return spec


@pytest.mark.parametrize("run", PASSES, ids=lambda run: run.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_each_pass_keeps_the_logits(run: object, name: str) -> None:
    model = trained(name).double()
    expected = model(images(name))
    assert callable(run)
    changed = run(model)
    assert_same_logits(model(images(name)), expected)
    assert run(model) == ()
    assert bool(changed) == (run is merge_head_norm or "cnn" in name)


def test_batch_norm_bias_and_scale_become_mixing_and_mean_factors() -> None:
    model = trained()
    steps = dict(model.blocks[2].attention.scores.steps_after())  # type: ignore[index, union-attr]
    assert list(steps) == ["after.mixing", "after.bias", "after.norm", "after.scale"]
    theta, bias = steps["after.mixing"].weight.double(), steps["after.bias"].bias.double()
    norm = {name: tensor.double() for name, tensor in steps["after.norm"].state_dict().items()}
    s = 9**-0.5
    factor = s * norm["weight"] / (norm["running_var"] + 1e-5).sqrt()
    offset = factor * (bias - norm["running_mean"]) + s * norm["bias"]
    assert merge_head_norm(model) == ("blocks.2.attention", "blocks.3.attention")
    attention = model.blocks[2].attention  # type: ignore[index, union-attr]
    ((name, mixing),) = attention.scores.steps_after()
    assert name == "after.mixing"
    assert isinstance(mixing, HeadMixing)
    torch.testing.assert_close(mixing.weight, (theta * factor).float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(attention.mean_factors, (65 * offset).float()[:, None], rtol=1e-6, atol=1e-7)
    assert model.blocks[0].attention.mean_factors is None  # type: ignore[index, union-attr]


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


def test_scale_adjustment_becomes_epsilon_and_weights() -> None:
    model = trained()
    block = copy.deepcopy(model.blocks[1])  # type: ignore[index]
    assert merge_scale_adjustment(model) == tuple(f"blocks.{i}" for i in range(4))
    merged = model.blocks[1]  # type: ignore[index]
    assert isinstance(merged, DeepViTBlock)
    assert merged.scale_adjustment == 1
    assert [norm.eps for norm in (merged.attention_norm, merged.mlp_norm, model.head_norm)] == [4e-6, 4e-6, 1e-6]
    for old, new in ((block.attention.out, merged.attention.out), (block.mlp[2], merged.mlp[2])):  # type: ignore[union-attr, index]
        assert new.weight.equal(2 * old.weight)  # type: ignore[union-attr]
        assert new.bias.equal(2 * old.bias)  # type: ignore[union-attr]


@pytest.mark.parametrize("a", [0.3, 3.0])
def test_scale_adjustments_that_are_no_power_of_two(a: float) -> None:
    torch.manual_seed(0)
    model = model_from_spec(other_spec(scale_adjustment=a)).eval().requires_grad_(False).double()
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    expected = model(x)
    assert merge_scale_adjustment(model)
    assert_same_logits(model(x), expected)


def test_the_stem_has_no_batch_norm_left() -> None:
    model = trained()
    assert sum(isinstance(module, BatchNorm) for module in model.modules()) == 2
    assert merge_stem_norms(model) == ("stem.convolutions.0", "stem.convolutions.1")
    assert not any(isinstance(module, BatchNorm) for module in model.modules())
    convolutions = [module for name, module in model.named_modules() if name.startswith("stem.convolutions.")]
    assert all(isinstance(module, nn.Conv2d) and module.bias is not None for module in convolutions)


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


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_engine_passes_keep_the_logits(name: str, quantized: bool) -> None:
    plain = folded(name)
    engine = fold_for_engines(plain, engine_passes(plain.model.spec, quantized=quantized))
    assert_same_logits(exact_logits(engine.model, images(name)), exact_logits(plain.model, images(name)))


def test_mixed_heads_are_widened_and_plain_heads_are_not() -> None:
    engine = fold_for_engines(folded("deepvit_cnn_scaled"), [widen_reattention])
    assert engine.passes["widen_reattention"] == ("blocks.2.attention", "blocks.3.attention")
    assert [step.role for _, scores in attention_scores(engine.model) for _, step in scores.steps()] == ["scale"] * 4
    wide = engine.model.blocks[2].attention  # type: ignore[index, union-attr]
    assert isinstance(wide, WideReAttention)
    assert wide.values.shape == (3, 1, 27)
    assert fold_for_engines(engine, [widen_reattention]).passes["widen_reattention"] == ()


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
