"""Masks at another image size: which masks follow from the new grid, and which masks are refused.

    closed-form Gaussian mixture    alpha and sigma have no size
    Manhattan decay                 the decay rates of the heads have no size
    stored base                     refused: the file's base belongs to the old grid
    elementwise learnable mask      refused: the N × N weights have no geometry

Distances are measured in tokens. With the same sigma on a larger grid, a Gaussian covers as many tokens as before: the
same number of pixels, but a smaller part of the image. The model was not trained with the new grid, so only accuracy on
data shows whether the model still works.
"""

from __future__ import annotations

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.models.specs import MaskSpec

_STORED = (
    "the file stores the base mask of the training grid, whose small entries have underflowed to zero; a base mask of "
    "another grid would be another network"
)
_ELEMENTWISE = (
    "an elementwise learnable mask (ELM) has a trained weight for each pair of tokens of the training grid, and no "
    "rule gives the weights of another grid"
)


def check_mask_at_other_size(mask: MaskSpec) -> None:
    """Check that a model with this mask can be exported at another image size.

    If this function returns, the mask at the new size is the mask of a model that is built for the new grid and filled
    with the file's tensors, because no tensor of the mask has the size of the grid.
    Errors: InputError with the reason, when the mask belongs to the grid of the training.
    """
    if mask.kind == "elm" or (mask.kind == "gmm" and not mask.closed_form):
        raise InputError(
            f"the mask cannot be used at another image size: {_ELEMENTWISE if mask.kind == 'elm' else _STORED}",
            hint="leave --resize-to out; gmmvit then exports the model at the image size of the training",
        )
