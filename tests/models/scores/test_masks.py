"""Masks and biases on the scores: their numbers, and biases that a foreign network computes."""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.scores.biases import ManhattanDecay, PassedBias, PrefixBias, manhattan_distances
from gmmvit_deploy.models.scores.masks import (
    ClosedFormGaussianMask,
    GaussianMixtureMask,
    mask_from_spec,
    squared_distances,
    stored_base,
    stored_base_limits,
)
from gmmvit_deploy.models.specs import MaskSpec
from tests.conftest import GOLDEN


@pytest.mark.parametrize(("name", "grid"), [("vit_gmm", 8), ("vit_gmm_256_tokens", 16)])
def test_base_is_the_released_base_but_for_the_rounding_of_exp(name: str, grid: int) -> None:
    stored = torch.load(GOLDEN / f"{name}.pth", weights_only=True)["model_state_dict"]["mask"]
    difference = (stored_base(grid) - stored.reshape(1, 1, grid**2, grid**2)).abs()
    assert bool((difference <= stored_base_limits(grid)).all())
    assert float(stored_base_limits(grid)[..., 0, 1:].max()) < 2e-7


def test_a_base_without_underflow_is_beyond_the_limits() -> None:
    wrong = torch.exp(-squared_distances(16) / 2)[None, None]
    assert bool(((wrong - stored_base(16)).abs() > stored_base_limits(16)).any())


def test_base_is_rounded_once_whatever_the_processor() -> None:
    """exp(−d²) is the float32 number nearest to the exact value, which 60 decimal digits tell."""
    squared = squared_distances(16)[0].unique().int().tolist()
    with decimal.localcontext(prec=60):
        exact = [Fraction(Decimal(-number).exp()) for number in squared]
    base = dict(zip(squared_distances(16)[0].int().tolist(), stored_base(16)[0, 0, 0], strict=True))
    unit = Fraction(1, 2**149)
    for number, value in zip(squared, exact, strict=True):
        scale = max(unit, Fraction(2) ** (math.frexp(float(value) or 1.0)[1] - 24) if float(value) else unit)
        nearest = torch.tensor(float(round(value / scale) * scale))
        assert base[number].equal(nearest.sqrt()), number


def test_underflow_is_where_it_was_measured() -> None:
    base, distances = stored_base(16)[0, 0], squared_distances(16)
    assert bool((base[distances >= 104] == 0).all())
    assert bool((base[distances < 104] > 0).all())
    assert bool((stored_base(8) > 0).all())


def test_closed_form_is_another_network_at_256_tokens() -> None:
    alpha, sigma = torch.tensor([2.0]).reshape(1, 1, 1, 1), torch.tensor([9.0]).reshape(1, 1, 1, 1)
    stored = GaussianMixtureMask(alpha, sigma, 16).matrix().detach()
    closed = ClosedFormGaussianMask(alpha, sigma, 16).matrix().detach()
    near = squared_distances(16) < 88
    torch.testing.assert_close(stored[:, near], closed[:, near], rtol=1e-5, atol=1e-6)
    assert float((stored - closed).abs().max()) > 0.5


def test_gradients_stay_finite_where_the_base_is_zero() -> None:
    mask = mask_from_spec(MaskSpec(kind="gmm", kernels=3), heads=2, grid=16)
    assert mask is not None
    mask.matrix().square().sum().backward()
    for parameter in mask.parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.isfinite().all())


def by_definition(rows: int, columns: int, distance: Callable[[int, int], int]) -> torch.Tensor:
    """Return distance(Δrow, Δcolumn) between all tokens, numbered row by row."""
    places = [(row, column) for row in range(rows) for column in range(columns)]
    return torch.tensor([[float(distance(a[0] - b[0], a[1] - b[1])) for b in places] for a in places])


@pytest.mark.parametrize("grid", [(2, 5), (5, 2), (1, 4), (3, 3)], ids=str)
def test_distances_on_grids_that_are_not_square(grid: tuple[int, int]) -> None:
    squared = by_definition(*grid, lambda down, across: down**2 + across**2)
    assert squared_distances(grid).equal(squared)
    assert stored_base(grid).equal(torch.exp(-squared.double()).float().sqrt()[None, None])
    assert manhattan_distances(grid).equal(by_definition(*grid, lambda down, across: abs(down) + abs(across)))


def test_oddities_name_head_and_kernel_and_nothing_in_a_sound_mask() -> None:
    alpha, sigma = torch.ones(2, 2, 1, 1), torch.ones(2, 2, 1, 1)
    assert list(GaussianMixtureMask(alpha, sigma, 2).oddities()) == []
    alpha[1, 0], sigma[0, 1] = 0, 0.01
    oddities = [(odd.where, odd.what) for odd in GaussianMixtureMask(alpha, sigma, 2).oddities()]
    assert oddities == [
        (" head 1 kernel 0", "sigma is 0.01: through this kernel a token attends only to itself"),
        (" head 0 kernel 1", "alpha is 0: the kernel has no effect"),
    ]


# ---- biases behind prefix tokens, and of a foreign network -----------------------------------------------------------


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
