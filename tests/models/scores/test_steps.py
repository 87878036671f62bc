"""Every step against its formula, written in numpy with loops, as part of complete attention weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from gmmvit_deploy.models.scores.attention import AttentionScores
from gmmvit_deploy.models.scores.biases import ManhattanDecay, WindowBias, relative_position_index
from gmmvit_deploy.models.scores.heads import HeadBatchNorm, HeadBias, HeadMixing, HeadNorm
from gmmvit_deploy.models.scores.locality import MaskedDiagonal, ZeroDiagonal
from gmmvit_deploy.models.scores.masks import ClosedFormGaussianMask, ElementwiseMask, GaussianMixtureMask, PrefixMask
from gmmvit_deploy.models.scores.scales import LearnedTemperature, Scale
from gmmvit_deploy.models.scores.step import Step

GRID, HEADS, HEAD_DIM = 2, 3, 4
N = GRID**2
Array = np.ndarray
MAKE = torch.Generator().manual_seed(5)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=MAKE)


def each_entry(matrix: Callable[[int, int, int], float], n: int = N) -> Array:
    """Return (H, n, n), computed entry by entry."""
    return np.array([[[matrix(h, i, j) for j in range(n)] for i in range(n)] for h in range(HEADS)])


def squared(i: int, j: int) -> int:
    return (i // GRID - j // GRID) ** 2 + (i % GRID - j % GRID) ** 2


def manhattan(i: int, j: int) -> int:
    return abs(i // GRID - j // GRID) + abs(i % GRID - j % GRID)


def softmax(scores: Array) -> Array:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def mixed(scores: Array, weight: Array) -> Array:
    out = np.zeros_like(scores)
    for new in range(HEADS):
        for old in range(HEADS):
            out[new] += scores[old] * weight[old, new]
    return out


def normed(scores: Array, weight: Array, bias: Array) -> Array:
    out = np.zeros_like(scores)
    for i in range(scores.shape[1]):
        for j in range(scores.shape[2]):
            heads = scores[:, i, j]
            deviation = math.sqrt(((heads - heads.mean()) ** 2).mean() + 1e-5)
            out[:, i, j] = (heads - heads.mean()) / deviation * weight + bias
    return out


@dataclass(frozen=True)
class Case:
    """step: before softmax unless ``after``.  formula: its effect on (H, n, n) in float64."""

    step: Step
    formula: Callable[[Array], Array]
    role: str
    tokens: int = N
    after: bool = False
    mistakes: int = field(default=0)


def exact(tensor: torch.Tensor) -> Array:
    return tensor.detach().double().numpy()


def cases() -> Iterator[tuple[str, Case]]:
    alpha, sigma, weight = random(2, HEADS, 1, 1), random(2, HEADS, 1, 1).abs() + 0.5, random(N, N)
    a, s = exact(alpha)[..., 0, 0], exact(sigma)[..., 0, 0]

    def gaussian(h: int, i: int, j: int) -> float:
        return sum(a[k, h] * math.exp(-squared(i, j) / (2 * s[k, h] ** 2 + 2e-5)) for k in range(2))

    mixture = GaussianMixtureMask(alpha, sigma, GRID)
    yield "scale", Case(Scale(0.5), lambda x: 0.5 * x, "scale", mistakes=2)
    # On a grid this small nothing has underflowed, so the stored base gives the closed formula.
    yield "stored base", Case(mixture, lambda x: each_entry(gaussian) * x, "mask", mistakes=7)
    closed = ClosedFormGaussianMask(alpha, sigma, GRID)
    yield "closed form", Case(closed, lambda x: each_entry(gaussian) * x, "mask", mistakes=7)
    alone = GaussianMixtureMask(alpha[:, :1], sigma[:, :1], GRID)
    yield "shared", Case(alone, lambda x: each_entry(lambda h, i, j: gaussian(0, i, j)) * x, "mask", mistakes=4)
    yield "element-wise", Case(ElementwiseMask(weight), lambda x: exact(weight) * x, "mask", mistakes=5)

    def patches_only(h: int, i: int, j: int) -> float:
        return 1.0 if 0 in (i, j) else gaussian(h, i - 1, j - 1)

    token = PrefixMask(GaussianMixtureMask(alpha, sigma, GRID))
    yield "class token", Case(token, lambda x: each_entry(patches_only, N + 1) * x, "mask", tokens=N + 1, mistakes=9)

    def after_two(h: int, i: int, j: int) -> float:
        return 1.0 if min(i, j) < 2 else gaussian(h, i - 2, j - 2)

    two = PrefixMask(GaussianMixtureMask(alpha, sigma, GRID), prefix=2)
    yield "two prefix tokens", Case(two, lambda x: each_entry(after_two, N + 2) * x, "mask", tokens=N + 2, mistakes=9)
    table = random((2 * GRID - 1) ** 2, HEADS)

    def position(h: int, i: int, j: int) -> float:
        down, across = i // GRID - j // GRID + GRID - 1, i % GRID - j % GRID + GRID - 1
        return float(table[down * (2 * GRID - 1) + across, h])

    window = WindowBias(table, relative_position_index(GRID), None)
    yield "position bias", Case(window, lambda x: x + each_entry(position), "score_bias", mistakes=1)
    decay = torch.tensor([-0.1, -0.5, -2.0])
    yield (
        "Manhattan decay",
        Case(
            ManhattanDecay(decay, GRID),
            lambda x: x + each_entry(lambda h, i, j: float(decay[h]) * manhattan(i, j)),
            "score_bias",
            mistakes=4,
        ),
    )
    yield (
        "Manhattan decay along an axis",
        Case(
            ManhattanDecay(decay, (1, N)),
            lambda x: x + each_entry(lambda h, i, j: float(decay[h]) * abs(i - j)),
            "score_bias",
            mistakes=4,
        ),
    )
    t = random(HEADS).abs() + 0.1
    times_t = each_entry(lambda h, i, j: float(t[h]))
    yield "temperature", Case(LearnedTemperature(t, usual=0.5), lambda x: times_t * x, "scale", mistakes=4)
    of_query = LearnedTemperature(t, scales_query=True)
    yield "temperature of Q", Case(of_query, lambda x: times_t * x, "scale", mistakes=3)
    temperature = LearnedTemperature(torch.tensor(-0.7), is_logarithm=True)
    yield "temperature as logarithm", Case(temperature, lambda x: math.exp(-0.7) * x, "scale", mistakes=3)
    for name, value in (("diagonal −∞", -math.inf), ("diagonal, finite", -987654321.0)):
        off = each_entry(lambda h, i, j, value=value: value if i == j else 0.0)
        yield name, Case(MaskedDiagonal(N, value), lambda x, off=off: x + off, "score_bias", mistakes=1)
    off = each_entry(lambda h, i, j: float(i != j))
    yield "zero diagonal", Case(ZeroDiagonal(N), lambda x: off * x, "mask", mistakes=2)
    yield "zero diagonal of each head", Case(ZeroDiagonal(N, heads=HEADS), lambda x: off * x, "mask", mistakes=2)
    mixing, norm, shift = random(HEADS, HEADS), random(HEADS), random(HEADS)
    for after in (False, True):
        yield (
            f"mixing {'after' if after else 'before'}",
            Case(HeadMixing(mixing.clone()), lambda x: mixed(x, exact(mixing)), "mixing", after=after),
        )
    layer_norm, by_head = HeadNorm(norm.clone(), shift.clone()), exact(shift)[:, None, None]
    yield "norm", Case(layer_norm, lambda x: normed(x, exact(norm), exact(shift)), "norm", after=True, mistakes=2)
    yield "bias of each head", Case(HeadBias(shift.clone()), lambda x: x + by_head, "mixing", after=True, mistakes=1)
    factor = (exact(norm) / np.sqrt(np.arange(1, HEADS + 1) * 0.1 + 1e-5))[:, None, None]
    batch_norm = batch_norm_of(norm, shift)
    yield "BatchNorm", Case(batch_norm, lambda x: factor * (x - 0.1) + by_head, "norm", after=True, mistakes=3)


def batch_norm_of(weight: torch.Tensor, bias: torch.Tensor) -> HeadBatchNorm:
    """Return a BatchNorm with mean 0.1 and the variances 0.1, 0.2, …"""
    step = HeadBatchNorm(HEADS, tokens=10)
    with torch.no_grad():
        step.weight.copy_(weight)
        step.bias.copy_(bias)
        step.running_var.copy_(torch.arange(1, HEADS + 1) * 0.1)
    return step


CASES = dict(cases())
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def products(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, 2, HEADS, tokens, HEAD_DIM, generator=make)
    return query, key


@EACH
def test_weights_are_those_of_the_formula(case: Case) -> None:
    side = {"step": case.step}
    scores = AttentionScores({}, side) if case.after else AttentionScores(side)
    query, key = products(case.tokens)
    with torch.inference_mode():
        weights = scores.weights(query, key).numpy()
    for row in range(len(weights)):
        raw = exact(query[row]) @ exact(key[row]).transpose(0, 2, 1)
        expected = case.formula(softmax(raw)) if case.after else softmax(case.formula(raw))
        np.testing.assert_allclose(weights[row], expected, rtol=0, atol=5e-6)


@EACH
def test_folds_to_a_constant_of_the_same_role_bit_for_bit(case: Case) -> None:
    folded = case.step.folded()
    assert (folded.role, folded.operation) == (case.role, case.step.operation)
    assert folded.is_constant
    assert folded.matrix().equal(case.step.matrix())
    assert folded.folded() is folded
    query, _ = products(case.tokens)
    given = query if case.step.scales_query else query @ query.transpose(-2, -1)
    with torch.no_grad():
        assert folded(given).equal(case.step(given))


@EACH
def test_mistakes_are_other_functions_each_under_a_name_of_its_own(case: Case) -> None:
    query, _ = products(case.tokens)
    given = query if case.step.scales_query else query @ query.transpose(-2, -1)
    mistakes = list(case.step.mistakes())
    assert len({name for name, _ in mistakes}) == len(mistakes)
    # On a grid this small the closed formula may give the very bits of the stored base: see the next test.
    made = [other for name, other in mistakes if other is not case.step and "closed-form" not in name]
    with torch.no_grad():
        right = copy.deepcopy(case.step)(given)
        for other in made:
            assert not (given if other is None else other(given)).equal(right)
    assert len(made) == case.mistakes


def test_the_exponential_of_a_temperature_is_rounded_once() -> None:
    logarithms = torch.linspace(-8, 4, 1001)
    step = LearnedTemperature(logarithms, is_logarithm=True)
    expected = np.exp(logarithms.numpy().astype(np.float64))
    assert np.array_equal(step.folded().matrix().flatten().numpy(), expected.astype(np.float32))
    in_float64 = step.double().folded().matrix().flatten().numpy()
    np.testing.assert_allclose(in_float64, expected, rtol=1e-15)


@pytest.mark.parametrize("wrap", [lambda mask: mask, PrefixMask], ids=["alone", "class token"])
def test_closed_form_is_a_mistake_where_the_base_has_underflowed(wrap: Callable[[Step], Step]) -> None:
    alpha, sigma = torch.full((1, HEADS, 1, 1), 2.0), torch.full((1, HEADS, 1, 1), 9.0)
    step = wrap(GaussianMixtureMask(alpha, sigma, 16))
    name, other = next(step.mistakes())
    assert "closed-form" in name
    assert other is not None
    assert float((other.matrix() - step.matrix()).detach().abs().max()) > 0.5


def test_a_mistake_that_changes_nothing_is_the_step_itself() -> None:
    """The base of a shared mask has a single head, so there is no head to exchange it with."""
    mask = ElementwiseMask(torch.ones(N, N))
    assert all(other is mask for _, other in mask.mistakes())
