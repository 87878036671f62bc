"""Folding passes: what they change and refuse, also of steps and shapes that no released checkpoint has."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.cait.folding import WideHeadsAttention, widen_heads
from gmmvit_deploy.models.families.rmt.folding import share_decays
from gmmvit_deploy.models.families.swin import SwinSpec
from gmmvit_deploy.models.families.vit import ViTSpec
from gmmvit_deploy.models.families.vit.model import ViT
from gmmvit_deploy.models.folding.engine_forms import pad_heads
from gmmvit_deploy.models.folding.fold import engine_passes, fold, fold_for_engines, narrow_last_block
from gmmvit_deploy.models.folding.passes import (
    fold_biases,
    fold_masks,
    fold_scales,
    merge_biases,
    merge_scale,
    merge_scale_into_mixing,
    require_constant_steps,
)
from gmmvit_deploy.models.layers.blocks import Mlp
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.scores.attention import AttentionScores, attention_scores
from gmmvit_deploy.models.scores.biases import ManhattanDecay
from gmmvit_deploy.models.scores.heads import HeadMixing
from gmmvit_deploy.models.scores.locality import MaskedDiagonal, ZeroDiagonal
from gmmvit_deploy.models.scores.masks import ElementwiseMask
from gmmvit_deploy.models.scores.scales import LearnedTemperature, Scale
from gmmvit_deploy.models.scores.step import Multiply, Step
from gmmvit_deploy.models.specs import MaskSpec, ModelSpec
from tests.conftest import golden
from tests.exact import assert_same_logits, exact_logits
from tests.golden_files import trained
from tests.models.families.small_specs import small_spec
from tests.models.families.test_families import cait_specs, pit_specs, swin_specs

MASKED = {"gmm": MaskSpec(kind="gmm", kernels=3), "elm": MaskSpec(kind="elm")}


def roles(scores: AttentionScores) -> list[str]:
    return [step.role for _, step in scores.steps()]


def small(mask: MaskSpec) -> ViT:
    spec = ViTSpec(
        image_size=16,
        patch_size=4,
        classes=3,
        dim=12,
        depth=2,
        heads=2,
        head_dim=5,
        mlp_dim=8,
        class_token=mask.kind == "plain",
        mask=mask,
    )
    return ViT(spec).eval()


def test_leaves_plain_attention_alone() -> None:
    model = small(MaskSpec())
    result = fold(model)
    assert [name for name, changed in result.passes.items() if changed] == ["narrow_last_block"]
    assert result.masks == ()
    assert all(roles(scores) == ["scale"] for _, scores in attention_scores(result.model))
    assert all(scores.before.scale.factor == 5**-0.5 for _, scores in attention_scores(result.model))


def test_fold_first_cast_second() -> None:
    with pytest.raises(FoldError, match="fold the model before casting"):
        fold_masks(small(MASKED["gmm"]).half())


def test_a_mask_that_is_not_finite_is_refused() -> None:
    model = small(MASKED["elm"])
    with torch.no_grad():
        model.blocks[0].attention.scores.before.mask.weight[0, 0] = float("nan")
    with pytest.raises(FoldError, match=r"blocks\.0\.attention: the mask has NaN"):
        fold_masks(model)


def test_the_proof_can_fail() -> None:
    """Folding of a mask whose matrix changes from call to call cannot be proven."""
    model = small(MASKED["elm"])

    class Restless(type(model.blocks[0].attention.scores.before.mask)):  # type: ignore[misc]
        def matrix(self) -> torch.Tensor:
            return torch.randn(16, 16)

    model.blocks[1].attention.scores.before.mask = Restless(torch.zeros(16, 16))
    with pytest.raises(FoldError, match=r"blocks\.1\.attention: the folded mask is not bitwise equal"):
        fold_masks(model)


def test_256_tokens_keep_their_zeros() -> None:
    case = golden("vit_gmm_256_tokens")
    for record in fold(load_checkpoint(case.path).model).masks:
        assert int((record.constant == 0).all(0).sum()) >= 21792


def test_a_mean_that_is_not_the_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mlp, "mean_over_tokens", lambda mlp, x: mlp(x[:, :1]))
    with pytest.raises(FoldError, match="narrow_last_block changed the mean of the output tokens by"):
        narrow_last_block(small(MASKED["gmm"]))


# ---- steps that no released checkpoint has ---------------------------------------------------------------------------


HEADS, N = 2, 4


def attention(scores: AttentionScores) -> nn.Module:
    model = nn.Module()
    model.attention = nn.Module()
    model.attention.scores = scores
    return model.eval().requires_grad_(False)


def folded(scores: AttentionScores) -> dict[str, tuple[str, ...]]:
    model = attention(scores)
    passes = (fold_scales, fold_masks, fold_biases, merge_scale, merge_scale_into_mixing)
    changed = {run.__name__: run(model) for run in passes}
    require_constant_steps(model)
    assert not any(run(model) for run in passes)
    return {name: layers for name, layers in changed.items() if layers}


def weights(scores: AttentionScores) -> torch.Tensor:
    query, key = torch.randn(2, 1, HEADS, N, 3, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return scores.weights(query, key)


def temperature() -> LearnedTemperature:
    return LearnedTemperature(torch.tensor([0.5, 2.0]))


def mixing() -> HeadMixing:
    return HeadMixing(torch.randn(HEADS, HEADS))


@pytest.mark.parametrize(
    ("steps", "passes", "left"),
    [
        ((temperature(), MaskedDiagonal(N)), ["fold_scales", "fold_biases"], ["scale", "score_bias"]),
        ((temperature(), ZeroDiagonal(N)), ["fold_scales", "fold_masks", "merge_scale"], ["mask"]),
        ((temperature(), mixing()), ["fold_scales", "merge_scale_into_mixing"], ["mixing"]),
        ((Scale(0.5), ManhattanDecay(-torch.rand(HEADS), 2)), ["fold_biases"], ["scale", "score_bias"]),
        (
            (Scale(0.5), MaskedDiagonal(N, -100.0), ElementwiseMask(torch.rand(N, N))),
            ["fold_masks", "fold_biases"],
            ["scale", "score_bias", "mask"],
        ),
        ((Scale(0.5), MaskedDiagonal(N, -100.0), mixing()), ["fold_biases"], ["scale", "score_bias", "mixing"]),
    ],
    ids=["LSA", "temperature and mask", "temperature and mixing", "decay", "bias before mask", "bias before mixing"],
)
def test_the_passes_that_change_an_attention(steps: tuple[Step, ...], passes: list[str], left: list[str]) -> None:
    scores = AttentionScores({f"step{index}": step for index, step in enumerate(steps)})
    before = weights(scores)
    assert folded(scores) == dict.fromkeys(passes, ("attention",))
    assert roles(scores) == left
    torch.testing.assert_close(weights(scores), before)


def test_infinity_on_purpose_is_allowed_and_by_accident_is_not() -> None:
    assert fold_biases(attention(AttentionScores({"diagonal": MaskedDiagonal(N)}))) == ("attention",)
    wrong = ManhattanDecay(torch.tensor([-1.0, -math.inf]), 2)
    with pytest.raises(FoldError, match="the bias has NaN or infinite entries"):
        fold_biases(attention(AttentionScores({"decay": wrong})))
    up = MaskedDiagonal(N, math.inf)
    with pytest.raises(FoldError, match="the bias has NaN or infinite entries"):
        fold_biases(attention(AttentionScores({"diagonal": up})))


def test_a_step_that_no_pass_folds_is_an_error() -> None:
    class Novel(Multiply):
        role = "mixing"

        def matrix(self) -> torch.Tensor:
            return torch.ones(N, N)

    model = attention(AttentionScores({"novel": Novel()}))
    with pytest.raises(
        FoldError, match=r"replaced these steps by constants: attention\.scores\.before\.novel \(mixing\)"
    ):
        require_constant_steps(model)


def test_a_row_of_minus_infinity_is_refused() -> None:
    diagonal = MaskedDiagonal(N)
    diagonal.masked[1] = -math.inf
    model = attention(AttentionScores({"diagonal": diagonal}))
    fold_biases(model)
    with pytest.raises(FoldError, match=r"a row of the bias before\.diagonal is −∞ in every entry"):
        merge_biases(model)


# ---- equal decays of a stage of RMT are stored once, and no others ---------------------------------------------------


def deeper() -> Model:
    """An RMT whose second stage attends to the whole grid of 8×8 tokens in three blocks."""
    spec = replace(small_spec("rmt", "decay"), image_size=64, depths=(1, 3), decomposed_stages=(1,))
    torch.manual_seed(0)
    return model_from_spec(spec).eval().requires_grad_(False)


WHOLE = [f"stages.1.blocks.{block}.attention.tokens" for block in range(3)]
SHARED = ("stages.0.blocks.0.attention.columns", *WHOLE[1:])


def test_equal_decays_of_a_stage_are_stored_once() -> None:
    folded = fold(deeper())
    assert folded.passes["share_decays"] == SHARED
    scores = dict(attention_scores(folded.model))
    first, *others = (scores[name].before["decay"].get_buffer("constant") for name in WHOLE)
    assert all(other is first for other in others)
    assert share_decays(folded.model) == ()


def test_decays_that_differ_stay_apart() -> None:
    model = deeper()
    dict(attention_scores(model))[WHOLE[1]].before["decay"].get_buffer("decay")[0] *= 2
    assert fold(model).passes["share_decays"] == (SHARED[0], WHOLE[2])


# ---- the forms that become a single fused kernel of an engine --------------------------------------------------------


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
