"""Folding for engines keeps the function and produces the forms that become a single fused kernel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.cait.folding import WideHeadsAttention, widen_heads
from gmmvit_deploy.models.families.swin import SwinSpec
from gmmvit_deploy.models.folding.engine_forms import pad_heads
from gmmvit_deploy.models.folding.fold import engine_passes, fold, fold_for_engines
from gmmvit_deploy.models.specs import MaskSpec, ModelSpec
from tests.conftest import EXPORTED, golden
from tests.exact import assert_same_logits, exact_logits
from tests.golden_files import each_export, trained
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


@pytest.mark.parametrize("name", each_export(EXPORTED))
def test_logits_stay_the_same(name: str) -> None:
    plain = fold(trained(name))
    images = torch.from_numpy(golden(name).inputs)
    expected = exact_logits(plain.model, images)
    for quantized in (False, True):
        passes = engine_passes(plain.model.spec, quantized=quantized)
        logits = exact_logits(fold_for_engines(plain, passes).model, images)
        assert_same_logits(logits, expected)


@given(spec=st.one_of(swin_specs(), cait_specs(), pit_specs()))
@example(spec=SHARED_SWIN)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_logits_stay_the_same_in_shapes_that_no_golden_file_has(spec: ModelSpec) -> None:
    plain = fold(model_from_spec(spec).eval())
    images = torch.randn(2, 3, spec.image_size, spec.image_size)
    expected = exact_logits(plain.model, images)
    logits = exact_logits(fold_for_engines(plain, engine_passes(spec, quantized=True)).model, images)
    assert_same_logits(logits, expected)


@pytest.mark.parametrize(("name", "widened"), [("cait_plain", 5), ("cait_gmm", 2), ("sl_cait", 5), ("vp_cait", 3)])
def test_talking_heads_widen_where_all_heads_share_a_mask(name: str, widened: int) -> None:
    engine = fold_for_engines(fold(trained(name)), [widen_heads])
    assert len(engine.passes["widen_heads"]) == widened
    assert sum(isinstance(module, WideHeadsAttention) for module in engine.model.modules()) == widened


@pytest.mark.parametrize("name", ["vit_gmm", "vit_gmm_one_head", "t2t_gmm", "cait_gmm"])
def test_head_dims_that_are_good_are_left_alone(name: str) -> None:
    assert fold_for_engines(fold(trained(name)), [pad_heads]).passes["pad_heads"] == ()
