from __future__ import annotations

import pytest
import torch

from gmmvit_deploy.scores.masks import (
    ClosedFormGaussianMask,
    GaussianMixtureMask,
    mask_from_spec,
    squared_distances,
    stored_base,
)
from gmmvit_deploy.specs import MaskSpec
from tests.conftest import GOLDEN


@pytest.mark.parametrize(("name", "grid"), [("vit_gmm", 8), ("vit_gmm_256_tokens", 16)])
def test_base_equals_the_released_base_bit_for_bit(name: str, grid: int) -> None:
    stored = torch.load(GOLDEN / f"{name}.pth", weights_only=True)["model_state_dict"]["mask"]
    assert stored_base(grid).equal(stored.reshape(1, 1, grid**2, grid**2))


def test_distances_follow_rows_then_columns() -> None:
    distances = squared_distances(3)
    assert distances[0, 2] == 4  # two columns away
    assert distances[0, 6] == 4  # two rows away
    assert distances[1, 5] == 2  # one row, one column


def test_underflow_is_where_it_was_measured() -> None:
    base, distances = stored_base(16)[0, 0], squared_distances(16)
    assert bool((base[distances >= 104] == 0).all())
    assert bool((base[distances < 104] > 0).all())
    assert bool((stored_base(8) > 0).all())


def test_closed_form_is_another_network_at_256_tokens() -> None:
    alpha, sigma = torch.tensor([2.0]).reshape(1, 1, 1, 1), torch.tensor([9.0]).reshape(1, 1, 1, 1)
    stored = GaussianMixtureMask(alpha, sigma, stored_base(16)).matrix().detach()
    closed = ClosedFormGaussianMask(alpha, sigma, squared_distances(16)).matrix().detach()
    near = squared_distances(16) < 88
    torch.testing.assert_close(stored[:, near], closed[:, near], rtol=1e-5, atol=1e-6)
    assert float((stored - closed).abs().max()) > 0.5


def test_closed_form_and_stored_base_agree_on_a_small_grid() -> None:
    alpha, sigma = torch.randn(3, 2, 1, 1), torch.rand(3, 2, 1, 1) + 0.5
    stored = GaussianMixtureMask(alpha, sigma, stored_base(4)).matrix()
    closed = ClosedFormGaussianMask(alpha, sigma, squared_distances(4)).matrix()
    torch.testing.assert_close(stored, closed, rtol=1e-5, atol=1e-6)


def test_gradients_stay_finite_where_the_base_is_zero() -> None:
    mask = mask_from_spec(MaskSpec(kind="gmm", kernels=3), heads=2, grid=16)
    assert mask is not None
    mask.matrix().square().sum().backward()
    for parameter in mask.parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.isfinite().all())
