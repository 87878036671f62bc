"""Proofs of rewrites: before and after, a module outputs the same values for random inputs, in float64."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.specs import input_shape

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


@torch.no_grad()
def change_modules(
    what: str,
    model: nn.Module,
    kind: type[_Module],
    change: Callable[[_Module], bool],
    inputs: Callable[[_Module], Tensor],
) -> tuple[str, ...]:
    """Apply ``change`` to each module of a class, and return the names of the modules for which it returned True.

    what: the pass, for the message.  inputs: module → a batch for its forward.
    Errors: FoldError when the change of a copy in float64 changes the output by more than rounding.
    """
    changed = []
    for name, module in model.named_modules():
        if isinstance(module, kind):
            exact = copy.deepcopy(module).double()
            if change(exact):
                require_same_output(f"{name}: {what}", module, exact, inputs(module))
                change(module)
                changed.append(name)
    return tuple(changed)


def merge_factor(layer: object, factor: object) -> bool:
    """Merge γ into a linear layer: γ ∘ (W x + b)  →  (γ ∘ W) x + γ ∘ b.

    Returns False for another layer, and for a factor that is not a number for each output of the layer.
    """
    if not isinstance(layer, nn.Linear) or not isinstance(factor, Tensor) or factor.shape != (layer.out_features,):
        return False
    layer.weight.mul_(factor[:, None])
    if layer.bias is not None:
        layer.bias.mul_(factor)
    return True


_Module = TypeVar("_Module", bound=nn.Module)
_IMAGES = 2
_ROUNDING_OF_WEIGHTS = 1e-5
"""Largest change of the float64 logits, relative to the largest logit. Merged weights such as γ ∘ W are rounded to
float32, which changes the logits by about 1e-6; a wrong change changes them by far more."""


def tried(change: Callable[[Any], tuple[str, ...]]) -> Callable[[Model], tuple[str, ...]]:
    """Decorator of a folding pass: the network stays as it is if the pass changes the logits by more than rounding.

    For modules of another package: the pass runs on a copy first, because it only recognises them by names.
    """

    @torch.no_grad()
    @functools.wraps(change)
    def run(model: Model) -> tuple[str, ...]:
        trial = copy.deepcopy(model)
        if not change(trial):
            return ()
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(_IMAGES, *input_shape(model.spec), dtype=torch.float64, generator=generator)
        logits = trial.double()(images)
        del trial  # a copy in float64 has twice the memory of the weights
        expected = copy.deepcopy(model).double()(images)
        scale = float(expected.abs().max())
        if not float((logits - expected).abs().max()) <= _ROUNDING_OF_WEIGHTS * max(scale, 1.0):
            return ()
        return change(model)

    return run
