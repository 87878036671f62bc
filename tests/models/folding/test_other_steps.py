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
from gmmvit_deploy.models.scores.attention import AttentionScores
from gmmvit_deploy.models.scores.biases import ManhattanDecay
from gmmvit_deploy.models.scores.heads import HeadMixing
from gmmvit_deploy.models.scores.locality import MaskedDiagonal, ZeroDiagonal
from gmmvit_deploy.models.scores.masks import ElementwiseMask
from gmmvit_deploy.models.scores.scales import LearnedTemperature, Scale
from gmmvit_deploy.models.scores.step import Multiply, Step

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
