"""The proof of a rewrite: the old and the new module output the same values for random inputs, in float64."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from gmmvit_deploy.errors import FoldError

_ROUNDING = 1e-11
"""Largest difference of two float64 outputs, relative to the largest output or to 1; a wrong rewrite differs more."""


def random_values(*shape: int) -> Tensor:
    """Return random numbers in float64, the same in every call."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def require_same_output(
    what: str, before: nn.Module, after: nn.Module, *inputs: Tensor, rounding: float = _ROUNDING
) -> None:
    """Check that two modules compute the same function of ``inputs``, up to float64 rounding.  Neither changes.

    what: the module and the pass, for the message.  rounding: the largest difference, as `_ROUNDING`.
    Errors: FoldError when the outputs differ.
    """
    expected, output = (copy.deepcopy(module).double()(*inputs) for module in (before, after))
    difference = float((output - expected).abs().max())
    if not difference <= rounding * max(1.0, float(expected.abs().max())):
        raise FoldError(f"{what} changed the output by {difference:.2e}; expected only rounding")
