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


def test_mistakes_keep_the_prefix() -> None:
    step = PrefixBias(ManhattanDecay(DECAY, 2), 1)
    (_, missing), (_, reversed_heads), (_, multiplied), (_, multiplied_rates) = step.mistakes()
    assert missing is None
    assert reversed_heads is not None
    assert reversed_heads.matrix().equal(step.matrix().flip(0))
    scores = torch.randn(3, 2, 5, 5)
    for mistake, factors in ((multiplied, step.patches.matrix()), (multiplied_rates, step.patches.matrix().exp())):
        assert mistake is not None
        assert mistake(scores)[..., 1:, 1:].equal(factors * scores[..., 1:, 1:])
        assert mistake(scores)[..., 0, :].equal(scores[..., 0, :])
        assert mistake(scores)[..., 0].equal(scores[..., 0])


def test_a_prefix_has_a_token() -> None:
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        PrefixBias(ManhattanDecay(DECAY, 2), 0)


def test_decay_rates() -> None:
    expected = [math.log(1 - 2 ** (-2 - 4 * head / 3)) for head in range(3)]
    torch.testing.assert_close(retention_decays(3), torch.tensor(expected))
    assert retention_decays(1).tolist() == pytest.approx([math.log(0.75)])
