"""A bias on the scores between patches, behind prefix tokens; the decay rates of RMT."""

import math

import pytest
import torch

from gmmvit_deploy.models.scores.biases import ManhattanDecay, PrefixBias, manhattan_distances, retention_decays

DECAY = torch.tensor([-0.1, -0.5])


def test_prefix_tokens_get_a_bias_of_zero() -> None:
    step = PrefixBias(ManhattanDecay(DECAY, (2, 3)), 2)
    matrix, scores = step.matrix(), torch.randn(4, 2, 8, 8)
    assert matrix[:, 2:, 2:].equal(DECAY[:, None, None] * manhattan_distances((2, 3)))
    assert not matrix[:, :2].any()
    assert not matrix[:, :, :2].any()
    assert step(scores).equal(scores + matrix)
    assert step.folded()(scores).equal(step(scores))


def test_decay_rates() -> None:
    expected = [math.log(1 - 2 ** (-2 - 4 * head / 3)) for head in range(3)]
    torch.testing.assert_close(retention_decays(3), torch.tensor(expected))
    assert retention_decays(1).tolist() == pytest.approx([math.log(0.75)])
