"""Shapes in signatures are checked while tests run; without this test a run without the checks would go unnoticed.

It is not among the tests that the Makefile runs again without the checks.
"""

from __future__ import annotations

import pytest
import torch
from jaxtyping import TypeCheckError

from gmmvit_deploy.models.families.vit import VIT
from gmmvit_deploy.models.layers.attention import heads_of
from gmmvit_deploy.models.layers.patches import PatchEmbedding
from gmmvit_deploy.models.scores.masks import squared_distances
from gmmvit_deploy.models.specs import MaskSpec


def test_a_tensor_of_another_rank_is_refused() -> None:
    embedding = PatchEmbedding(2, 8, channels=3)
    assert embedding(torch.zeros(1, 3, 4, 4)).shape == (1, 4, 8)
    with pytest.raises(TypeCheckError):
        embedding(torch.zeros(3, 4, 4))


def test_sides_that_must_be_equal_are_compared() -> None:
    model = VIT.build(VIT.small(MaskSpec()))
    with pytest.raises(TypeCheckError):
        model(torch.zeros(1, 3, 16, 12))


def test_a_type_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(TypeCheckError):
        heads_of([[0.0]], 1)  # type: ignore[arg-type]
    with pytest.raises(TypeCheckError):
        squared_distances("2")  # type: ignore[arg-type]
