"""Position embeddings at another image size, against a recorded file of the code bases and the installed timm."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.models.layers.positions import Grid, resample_positions
from gmmvit_deploy.models.specs import Interpolation
from tests.conftest import GOLDEN

RECORDED = np.load(GOLDEN / "timm" / "position_interpolation.npz")


def embeddings(grid: Grid, prefix: int, dim: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * grid[0] + 10 * grid[1] + prefix)
    return torch.randn(1, prefix + math.prod(grid), dim, generator=generator)


@pytest.mark.parametrize("name", [name for name in RECORDED.files if name != "pos_embed"])
def test_equals_the_recorded_embeddings(name: str) -> None:
    code_base, direction = name.split(".")
    interpolation: Interpolation = {"dinov2_registers": "timm"}.get(code_base, code_base)  # type: ignore[assignment]
    side = {"up": 6, "down": 3}[direction]
    resampled = resample_positions(
        torch.from_numpy(RECORDED["pos_embed"]), (4, 4), (side, side), interpolation=interpolation, prefix=1
    )
    # Each value is a sum of 4 · 4 products, of which each processor may round each differently in the last bit.
    limit = 16 * 2.0**-23 * float(np.abs(RECORDED[name]).max())
    np.testing.assert_allclose(resampled.numpy(), RECORDED[name], rtol=0, atol=limit)


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize(("old", "new"), [((4, 4), (6, 6)), ((7, 7), (3, 5)), ((3, 5), (6, 4)), ((2, 8), (4, 4))])
def test_timm_equals_the_installed_timm(old: Grid, new: Grid, prefix: int) -> None:
    layers = pytest.importorskip("timm.layers")
    positions = embeddings(old, prefix)
    expected = layers.resample_abs_pos_embed(positions, list(new), old_size=list(old), num_prefix_tokens=prefix)
    assert resample_positions(positions, old, new, interpolation="timm", prefix=prefix).equal(expected)


@pytest.mark.parametrize(
    ("interpolation", "old", "new", "refused"),
    [
        ("torchvision", (4, 4), (3, 5), "square new grid"),
        ("deit", (2, 8), (4, 4), "square old grid"),
        ("dino", (2, 8), (4, 4), "square old grid"),
    ],
)
def test_an_algorithm_for_square_grids_refuses_other_grids(
    interpolation: Interpolation, old: Grid, new: Grid, refused: str
) -> None:
    with pytest.raises(
        InputError, match=f"--set interpolation={interpolation} is defined only for a {refused}"
    ) as caught:
        resample_positions(embeddings(old, 1), old, new, interpolation=interpolation, prefix=1)
    assert "--set interpolation=timm" in caught.value.hint
