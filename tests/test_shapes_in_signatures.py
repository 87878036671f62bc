"""Shapes in signatures are checked while tests run; without this test a run without the checks would go unnoticed.

It is not among the tests that the Makefile runs again without the checks.
"""

from __future__ import annotations

import pytest
import torch
from jaxtyping import TypeCheckError

from gmmvit_deploy.models.layers.patches import PatchEmbedding


def test_a_tensor_of_another_rank_is_refused() -> None:
    embedding = PatchEmbedding(2, 8, channels=3)
    assert embedding(torch.zeros(1, 3, 4, 4)).shape == (1, 4, 8)
    with pytest.raises(TypeCheckError):
        embedding(torch.zeros(3, 4, 4))
