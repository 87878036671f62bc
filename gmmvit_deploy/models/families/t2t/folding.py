"""T2T-ViT: replace unfold operations by convolutions, and remove tensors that the network never reads."""

from __future__ import annotations

from torch import nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.families.t2t.model import T2T
from gmmvit_deploy.models.layers.unfolding import Unfold, unfolds_as_convolutions

__all__ = ["drop_unused", "unfold_as_convolution"]


def unfold_as_convolution(model: nn.Module) -> tuple[str, ...]:
    """Replace each `Unfold` by a convolution with one-hot filters.

    out[b, (i, j), (c, r, s)] = x[b, c, 2i+r−1, 2j+s−1]

    Ensures: no `Unfold` remains, and on random inputs each convolution outputs the same values as the `Unfold` that the
    convolution replaces.
    Returns the names of the replaced modules.
    Errors: FoldError when the values differ or an `Unfold` remains.
    """
    if not isinstance(model, T2T):
        return ()
    channels = [model.spec.views, *[model.spec.token_dim] * model.spec.token_layers]
    changed = unfolds_as_convolutions("unfolds", model.unfolds, channels)
    if any(isinstance(module, Unfold) for module in model.modules()):
        raise FoldError("an Unfold module remains after every unfold of the model was replaced")
    return changed


def drop_unused(model: nn.Module) -> tuple[str, ...]:
    """Remove the class token and the norm that the training code stores but the network never reads.

    The T2T of the released code of SPT and LSA reads its class token, which stays.

    Ensures: every remaining parameter of the model is read in the forward pass.
    Returns the names of the removed parameters.
    """
    if not isinstance(model, T2T) or model.unused is None:
        return ()
    names = tuple(f"unused.{name}" for name in model.unused)
    model.unused = None
    return names
