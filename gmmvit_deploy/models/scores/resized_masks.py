"""Masks at another image size: which masks are computed again on the new grid, and which masks are refused.

    closed-form Gaussian mixture    M is computed again: alpha and sigma have no size
    Manhattan decay                 B is computed again: the decay rates of the heads have no size
    stored base                     refused: the file's base belongs to the old grid
    elementwise learnable mask      refused: the N × N weights have no geometry

Distances are measured in tokens. With the same sigma on a larger grid, a Gaussian covers as many tokens as before: the
same number of pixels, but a smaller part of the image. The model was not trained with the new grid, so only accuracy on
data shows whether the model still works.
"""

from __future__ import annotations

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.models.scores.biases import ManhattanDecay
from gmmvit_deploy.models.scores.grids import Grid
from gmmvit_deploy.models.scores.masks import (
    ClosedFormGaussianMask,
    ElementwiseMask,
    GaussianMixtureMask,
    Mask,
    PrefixMask,
    squared_distances,
)
from gmmvit_deploy.models.scores.step import Step
from gmmvit_deploy.models.specs import MaskSpec

_STORED = (
    "the file stores the base mask of the training grid, whose small entries have underflowed to zero; a base mask of "
    "another grid would be another network"
)
_ELEMENTWISE = (
    "an elementwise learnable mask (ELM) has a trained weight for each pair of tokens of the training grid, and no "
    "rule gives the weights of another grid"
)
_HINT = "leave --resize-to out; gmmvit then exports the model at the image size of the training"
_WITHOUT_SIZE: frozenset[str] = frozenset({"plain", "decay"})
"""Kinds of mask without a trained or stored value for each pair of tokens."""


def check_mask_at_other_size(mask: MaskSpec) -> None:
    """Check that a model with this mask can be exported at another image size.

    If this function returns, the mask at the new size is the mask of a model that is built for the new grid and filled
    with the file's tensors, because no tensor of the mask has the size of the grid.
    Errors: InputError with the reason, when the mask belongs to the grid of the training.
    """
    if mask.kind in _WITHOUT_SIZE:
        return
    if mask.kind != "gmm":
        raise _refusal(
            _ELEMENTWISE if mask.kind == "elm" else f"a mask of kind {mask.kind} has no rule for another grid"
        )
    if not mask.closed_form:
        raise _refusal(_STORED)


def mask_at_other_size(step: Step, grid: Grid) -> Step:
    """Return the mask or the decay on a grid of another size, with the same trained parameters.

    step: a mask, or Manhattan decay.  grid: the new grid.
    The returned step has copies of the parameters of ``step``, and its matrix has the order of operations of training.
    Errors: InputError with the reason, when the step has values that belong to its own grid.
    """
    if isinstance(step, PrefixMask):
        patches = mask_at_other_size(step.patches, grid)
        if not isinstance(patches, Mask):
            raise _refusal("prefix tokens stay outside of a mask, and not of another step")
        return PrefixMask(patches, step.prefix)
    if isinstance(step, ClosedFormGaussianMask):
        distances = squared_distances(grid)
        return ClosedFormGaussianMask(step.alpha.detach().clone(), step.sigma.detach().clone(), distances, grid=grid)
    if isinstance(step, ManhattanDecay):
        return ManhattanDecay(step.decay.clone(), grid)
    if isinstance(step, GaussianMixtureMask):
        raise _refusal(_STORED)
    if isinstance(step, ElementwiseMask):
        raise _refusal(_ELEMENTWISE)
    raise _refusal(f"a step of class {type(step).__name__} has no rule for another grid")


def _refusal(reason: str) -> InputError:
    return InputError(f"the mask cannot be used at another image size: {reason}", hint=_HINT)
