"""Folding for engines keeps the function and produces the forms that become a single fused kernel."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.cait.spec import CaiTSpec
from gmmvit_deploy.models.families.cait.wide_heads import WideHeadsAttention, widen_heads
from gmmvit_deploy.models.families.swin.folding import join_windows
from gmmvit_deploy.models.families.swin.spec import SwinSpec
from gmmvit_deploy.models.folding.fold import FoldedModel, engine_passes, fold, fold_for_engines
from gmmvit_deploy.models.folding.head_padding import pad_heads
from gmmvit_deploy.models.folding.projections import separate_projections
from gmmvit_deploy.models.layers.attention import MaskedAttention
from gmmvit_deploy.models.layers.head_dims import padded_head_dim
from gmmvit_deploy.models.scores.attention import attention_scores
from gmmvit_deploy.models.specs import MaskSpec, ModelSpec
from tests.conftest import RELEASED, golden
from tests.exact import assert_same_logits, exact_logits
from tests.models.families.test_families import cait_specs, pit_specs, swin_specs

SHARED_SWIN = SwinSpec(
    image_size=4,
    patch_size=1,
    classes=1,
    dim=2,
    depths=(2, 1),
    heads=(2, 2),
    window=2,
    mlp_dims=(1, 1),
    mask=MaskSpec(kind="gmm", kernels=2, shared=True),
)
"""A mask that all heads share, with shifted windows: the mask must be repeated for heads and for windows."""


def folded(name: str) -> FoldedModel:
    case = golden(name)
    return fold(load_checkpoint(case.path, case.hints).model)


@pytest.mark.first(2)
@pytest.mark.parametrize("name", RELEASED)
def test_logits_stay_the_same(name: str) -> None:
    plain = folded(name)
    images = torch.from_numpy(golden(name).inputs)
    expected = exact_logits(plain.model, images)
    for quantized in (False, True):
        passes = engine_passes(plain.model.spec, quantized=quantized)
        logits = exact_logits(fold_for_engines(plain, passes).model, images)
        assert_same_logits(logits, expected)


@given(spec=st.one_of(swin_specs(), cait_specs(), pit_specs()))
@example(spec=SHARED_SWIN)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_logits_stay_the_same_in_shapes_that_no_golden_file_has(spec: ModelSpec) -> None:
    plain = fold(model_from_spec(spec).eval())
    images = torch.randn(2, 3, spec.image_size, spec.image_size)
    expected = exact_logits(plain.model, images)
    logits = exact_logits(fold_for_engines(plain, engine_passes(spec, quantized=True)).model, images)
    assert_same_logits(logits, expected)


def test_the_folded_model_itself_is_left_as_it_was() -> None:
    plain = folded("swin_gmm")
    before = {name: tensor.clone() for name, tensor in plain.model.state_dict().items()}
    fold_for_engines(plain)
    after = plain.model.state_dict()
    assert before.keys() == after.keys()
    assert all(tensor.equal(after[name]) for name, tensor in before.items())


def test_folding_twice_changes_nothing() -> None:
    plain = folded("swin_gmm")
    once = fold_for_engines(plain, engine_passes(plain.model.spec, quantized=True))
    model = copy.deepcopy(once.model)
    assert [run(model) for run in (join_windows, widen_heads)] == [(), ()]
    assert separate_projections(model) == ()


def test_windows_lie_in_the_batch_or_among_the_heads() -> None:
    plain = folded("swin_gmm_whole_grid")
    engine = fold_for_engines(plain, [join_windows])
    shapes = [tuple(mask.constant.shape) for mask in engine.masks]
    # (windows · heads, n, n) where windows shift, (heads, n, n) elsewhere
    assert shapes == [(3, 16, 16), (48, 16, 16), (6, 16, 16), (24, 16, 16), (12, 16, 16), (12, 16, 16)]
    for old, new in zip(plain.masks, engine.masks, strict=True):
        windows = new.constant.shape[0] // old.constant.shape[0]
        assert new.constant.equal(old.constant.repeat(windows, 1, 1))
        assert new.trained.equal(old.trained)
    for old, new in zip(plain.biases, engine.biases, strict=True):
        assert new.constant.equal(old.constant.flatten(0, -3))


def test_windows_wait_for_their_biases_to_be_folded() -> None:
    case = golden("swin_gmm")
    with pytest.raises(FoldError, match="run fold_masks and fold_biases before join_windows"):
        join_windows(load_checkpoint(case.path, case.hints).model)


@pytest.mark.parametrize(("name", "widened"), [("cait_plain", 5), ("cait_elm", 5), ("cait_gmm", 2)])
def test_talking_heads_widen_where_all_heads_share_a_mask(name: str, widened: int) -> None:
    engine = fold_for_engines(folded(name), [widen_heads])
    assert len(engine.passes["widen_heads"]) == widened
    assert sum(isinstance(module, WideHeadsAttention) for module in engine.model.modules()) == widened


def test_talking_heads_stay_where_wide_heads_would_not_fuse() -> None:
    spec = CaiTSpec(
        image_size=8,
        patch_size=4,
        classes=2,
        dim=8,
        depth=1,
        class_depth=1,
        heads=5,
        head_dim=64,
        mlp_dim=8,
        mask=MaskSpec(),
    )
    plain = fold(model_from_spec(spec).eval())
    assert fold_for_engines(plain).passes["widen_heads"] == ()
    assert len(fold_for_engines(fold(model_from_spec(replace(spec, heads=4)).eval())).passes["widen_heads"]) == 2


def test_heads_wait_for_their_masks_to_be_folded() -> None:
    case = golden("cait_elm")
    with pytest.raises(FoldError, match="run the folding passes before widen_heads"):
        widen_heads(load_checkpoint(case.path, case.hints).model)


@pytest.mark.parametrize(
    ("head_dim", "padded"), [(6, 16), (300, 300), (9, 16), (12, 16), (16, 16), (20, 24), (21, 24), (64, 64)]
)
def test_padded_head_dims(head_dim: int, padded: int) -> None:
    assert padded_head_dim(head_dim) == padded


def test_heads_are_padded_with_zeros_and_nothing_else() -> None:
    plain = folded("pit_gmm")  # head dim 12
    engine = fold_for_engines(plain, [pad_heads])
    for name, attention in plain.model.named_modules():
        if isinstance(attention, MaskedAttention):
            padded = engine.model.get_submodule(name)
            heads = attention.heads
            rows = padded.qkv.weight.unflatten(0, (3 * heads, 16))
            assert rows[:, :12].equal(attention.qkv.weight.unflatten(0, (3 * heads, 12)))
            assert not rows[:, 12:].any()
            columns = padded.out.weight.unflatten(1, (heads, 16))
            assert columns[:, :, :12].equal(attention.out.weight.unflatten(1, (heads, 12)))
            assert not columns[:, :, 12:].any()
    after, before = ([s for _, scores in attention_scores(m.model) for s in scores.steps()] for m in (engine, plain))
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(new.matrix().equal(old.matrix()) for (_, new), (_, old) in zip(after, before, strict=True))


@pytest.mark.parametrize("name", ["vit_gmm", "vit_gmm_one_head", "t2t_gmm", "cait_gmm"])
def test_head_dims_that_are_good_are_left_alone(name: str) -> None:
    assert fold_for_engines(folded(name), [pad_heads]).passes["pad_heads"] == ()


def test_heads_are_padded_before_projections_are_separated() -> None:
    model = copy.deepcopy(folded("pit_gmm").model)
    separate_projections(model)
    with pytest.raises(FoldError, match="run pad_heads before separate_projections"):
        pad_heads(model)


def test_separate_projections_hold_the_stacked_weights() -> None:
    plain = folded("swin_gmm")
    engine = fold_for_engines(plain, [separate_projections])
    for name, attention in plain.model.named_modules():
        if isinstance(attention, MaskedAttention):
            parts = engine.model.get_submodule(name).qkv.parts
            assert torch.cat([part.weight for part in parts]).equal(attention.qkv.weight)
            assert torch.cat([part.bias for part in parts]).equal(attention.qkv.bias)
