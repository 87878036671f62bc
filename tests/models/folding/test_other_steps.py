"""Folding passes on steps that no released checkpoint has: which passes change them, and which do not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.folding.passes import (
    fold_biases,
    fold_masks,
    fold_scales,
    merge_biases,
    merge_scale,
    merge_scale_into_mixing,
    require_constant_steps,
)
from gmmvit_deploy.models.folding.query_scales import merge_temperature_into_query
from gmmvit_deploy.models.layers.attention import MaskedAttention
from gmmvit_deploy.models.scores.attention import AttentionScores
from gmmvit_deploy.models.scores.biases import ManhattanDecay
from gmmvit_deploy.models.scores.diagonals import MaskedDiagonal, ZeroDiagonal
from gmmvit_deploy.models.scores.heads import HeadMixing
from gmmvit_deploy.models.scores.masks import ElementwiseMask
from gmmvit_deploy.models.scores.scales import LearnedTemperature, Scale
from gmmvit_deploy.models.scores.step import Constant, Multiply

HEADS, N = 2, 4


def attention(scores: AttentionScores) -> nn.Module:
    model = nn.Module()
    model.attention = nn.Module()
    model.attention.scores = scores
    return model.eval().requires_grad_(False)


def roles(scores: AttentionScores) -> list[str]:
    return [step.role for _, step in scores.steps()]


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


def test_locality_self_attention_keeps_its_roles_and_its_bits() -> None:
    scores = AttentionScores({"temperature": temperature(), "diagonal": MaskedDiagonal(N, -math.inf)})
    before = weights(scores)
    assert folded(scores) == {"fold_scales": ("attention",), "fold_biases": ("attention",)}
    assert roles(scores) == ["scale", "score_bias"]
    assert all(isinstance(step, Constant) for _, step in scores.steps())
    assert not list(scores.parameters())
    assert weights(scores).equal(before)


def test_temperature_goes_into_the_mask_behind_it() -> None:
    scores = AttentionScores({"temperature": temperature(), "diagonal": ZeroDiagonal(N)})
    before = weights(scores)
    changed = folded(scores)
    assert list(changed) == ["fold_scales", "fold_masks", "merge_scale"]
    assert roles(scores) == ["mask"]
    torch.testing.assert_close(weights(scores), before)


def test_temperature_goes_into_the_mixing_behind_it() -> None:
    scores = AttentionScores({"temperature": temperature(), "mixing": HeadMixing(torch.randn(HEADS, HEADS))})
    before = weights(scores)
    assert list(folded(scores)) == ["fold_scales", "merge_scale_into_mixing"]
    assert roles(scores) == ["mixing"]
    torch.testing.assert_close(weights(scores), before)


def test_decay_becomes_a_constant_and_leaves_the_scale_alone() -> None:
    scores = AttentionScores({"scale": Scale(0.5), "decay": ManhattanDecay(-torch.rand(HEADS), 2)})
    before = weights(scores)
    assert folded(scores) == {"fold_biases": ("attention",)}
    assert roles(scores) == ["scale", "score_bias"]
    assert weights(scores).equal(before)


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


def test_a_scale_is_left_alone_where_another_step_stands_between() -> None:
    mask, diagonal = ElementwiseMask(torch.rand(N, N)), MaskedDiagonal(N, -100.0)
    scores = AttentionScores({"scale": Scale(0.5), "diagonal": diagonal, "mask": mask})
    before = weights(scores)
    assert sorted(folded(scores)) == ["fold_biases", "fold_masks"]
    assert roles(scores) == ["scale", "score_bias", "mask"]
    assert weights(scores).equal(before)
    mixing = HeadMixing(torch.randn(HEADS, HEADS))
    mixes = AttentionScores({"scale": Scale(0.5), "diagonal": MaskedDiagonal(N, -100.0), "mixing": mixing})
    assert list(folded(mixes)) == ["fold_biases"]
    assert roles(mixes) == ["scale", "score_bias", "mixing"]


def test_a_bias_and_a_masked_diagonal_become_a_single_bias() -> None:
    scores = AttentionScores({"decay": ManhattanDecay(-torch.rand(HEADS), 2), "diagonal": MaskedDiagonal(N, -math.inf)})
    before, model = weights(scores), attention(scores)
    fold_biases(model)
    assert merge_biases(model) == ("attention",)
    assert merge_biases(model) == ()
    assert roles(scores) == ["score_bias"]
    assert weights(scores).equal(before)


def test_a_row_of_minus_infinity_is_refused() -> None:
    diagonal = MaskedDiagonal(N)
    diagonal.masked[1] = -math.inf
    model = attention(AttentionScores({"diagonal": diagonal}))
    fold_biases(model)
    with pytest.raises(FoldError, match=r"a row of the bias before\.diagonal is −∞ in every entry"):
        merge_biases(model)
    with pytest.raises(ValueError, match="expected at least 2 tokens, got 1"):
        MaskedDiagonal(1)


def projecting(scores: AttentionScores) -> nn.Module:
    model = nn.Module()
    model.attention = MaskedAttention(dim=6, heads=HEADS, head_dim=3, scores=scores, qkv_bias=True)
    return model.eval().requires_grad_(False)


def test_temperature_goes_into_the_rows_of_q() -> None:
    torch.manual_seed(0)
    scores = AttentionScores({"temperature": temperature(), "diagonal": MaskedDiagonal(N)})
    model, x = projecting(scores), torch.randn(2, N, 6)
    before = model.attention(x)  # type: ignore[operator]
    old = model.attention.qkv.weight.clone()  # type: ignore[union-attr]
    with pytest.raises(FoldError, match="run fold_scales first"):
        merge_temperature_into_query(model)
    fold_scales(model)
    assert merge_temperature_into_query(model) == ("attention",)
    assert merge_temperature_into_query(model) == ()
    assert roles(scores) == ["score_bias"]
    new = model.attention.qkv.weight  # type: ignore[union-attr]
    assert new[:3].equal(0.5 * old[:3])
    assert new[3:6].equal(2 * old[3:6])
    assert new[6:].equal(old[6:])
    torch.testing.assert_close(model.attention(x), before)  # type: ignore[operator]
