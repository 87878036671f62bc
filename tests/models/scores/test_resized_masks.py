"""Masks at another image size: computed again without values of the old grid, refused with such values."""

from __future__ import annotations

import copy

import pytest
import torch

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.models.scores.masks import (
    ClosedFormGaussianMask,
    Mask,
    PrefixMask,
    mask_from_spec,
)
from gmmvit_deploy.models.scores.resized_masks import check_mask_at_other_size, mask_at_other_size
from gmmvit_deploy.models.specs import MaskSpec

CLOSED = MaskSpec(kind="gmm", kernels=3, closed_form=True)
STORED = MaskSpec(kind="gmm", kernels=3)
ELM = MaskSpec(kind="elm")


def built(spec: MaskSpec, grid: int = 3) -> Mask:
    torch.manual_seed(0)
    mask = mask_from_spec(spec, heads=2, grid=grid)
    assert mask is not None
    return mask


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (STORED, "the file stores the base mask of the training grid"),
        (ELM, r"\(ELM\) has a trained weight for each pair"),
    ],
)
def test_masks_of_the_training_grid_are_refused(spec: MaskSpec, reason: str) -> None:
    refused = f"the mask cannot be used at another image size: .*{reason}"
    with pytest.raises(InputError, match=refused) as caught:
        check_mask_at_other_size(spec)
    assert "leave --resize-to out" in caught.value.hint
    with pytest.raises(InputError, match=refused):
        mask_at_other_size(built(spec), 5)
    with pytest.raises(InputError, match=refused):
        mask_at_other_size(PrefixMask(built(spec)), 5)


def test_the_files_tensors_fill_a_mask_of_the_new_grid() -> None:
    """`check_mask_at_other_size` promises that the file's tensors fill a mask that is built for the new grid."""
    small, large = built(CLOSED, 3), built(CLOSED, 5)
    large.load_state_dict(small.state_dict())
    assert large.matrix().equal(mask_at_other_size(small, 5).matrix())


def test_a_closed_form_is_computed_again_from_alpha_and_sigma() -> None:
    small = built(CLOSED)
    assert isinstance(small, ClosedFormGaussianMask)
    before = copy.deepcopy(small.state_dict())
    large = mask_at_other_size(small, 5)
    matrix = large.matrix().detach()
    assert matrix.shape == (2, 25, 25)
    alpha, sigma = (parameter.detach().double()[..., 0, 0] for parameter in (small.alpha, small.sigma))
    for i, j in [(0, 0), (0, 24), (7, 13)]:
        distance = (i // 5 - j // 5) ** 2 + (i % 5 - j % 5) ** 2
        expected = (alpha * torch.exp(-distance / (2 * sigma**2 + 2e-5))).sum(dim=0)
        torch.testing.assert_close(matrix[:, i, j].double(), expected, rtol=1e-5, atol=1e-6)
    # two tokens at the same distance have the same factor on both grids
    assert matrix[:, 0, 1].equal(small.matrix().detach()[:, 0, 1])
    with torch.no_grad():
        large.get_parameter("alpha").zero_()
    assert all(tensor.equal(before[name]) for name, tensor in small.state_dict().items())
