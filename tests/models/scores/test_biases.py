"""Biases on the scores: behind prefix tokens, and of a foreign network, which computes them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.scores.biases import (
    ManhattanDecay,
    PassedBias,
    PrefixBias,
    manhattan_distances,
)

HEADS, N = 2, 3
DECAY = torch.tensor([-0.1, -0.5])


class Network(nn.Module):
    """Passes a table to the first step, and to the second step a table that may depend on the images."""

    def __init__(self, *, of_images: bool = False) -> None:
        super().__init__()
        self.of_images = of_images
        self.tables = nn.ParameterList(torch.randn(1, HEADS, N, N) for _ in range(2))
        self.steps = nn.ModuleList(PassedBias(self, (1, N, N)) for _ in range(2))

    def forward(self, images: Tensor) -> Tensor:
        scores = images
        for index, (table, step) in enumerate(zip(self.tables, self.steps, strict=True)):
            step.passed = table + images if self.of_images and index else table
            scores = step(scores)
        return scores


def test_a_changed_weight_changes_the_bias() -> None:
    network = Network()
    first, step = network.tables[0], network.steps[0]
    before = step.matrix()
    with torch.no_grad():
        first += 1
    assert step.matrix().equal(before + 1)
    network.tables[0] = nn.Parameter(first.detach() + 1)
    assert step.matrix().equal(first[0] + 1)
    assert network.double().steps[0].matrix().dtype == torch.float64


def test_only_the_bias_that_depends_on_the_images_is_refused() -> None:
    network = Network(of_images=True)
    assert network.steps[0].matrix().equal(network.tables[0][0])
    with pytest.raises(FoldError, match="depends on the image"):
        network.steps[1].matrix()


def test_prefix_tokens_get_a_bias_of_zero() -> None:
    step = PrefixBias(ManhattanDecay(DECAY, (2, 3)), 2)
    matrix, scores = step.matrix(), torch.randn(4, 2, 8, 8)
    assert matrix[:, 2:, 2:].equal(DECAY[:, None, None] * manhattan_distances((2, 3)))
    assert not matrix[:, :2].any()
    assert not matrix[:, :, :2].any()
    assert step(scores).equal(scores + matrix)
    assert step.folded()(scores).equal(step(scores))
