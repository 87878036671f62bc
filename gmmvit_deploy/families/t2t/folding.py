"""T2T-ViT: replace unfold operations by convolutions, and remove tensors that the network never reads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.families.t2t.model import T2T, Unfold
from gmmvit_deploy.layers.roles import with_role

__all__ = ["UnfoldConvolution", "drop_unused", "unfold_as_convolution"]

_SIDE = 3


class UnfoldConvolution(nn.Module):
    """`Unfold` as a depthwise convolution with nine filters per channel.

    Each filter selects a position of the 3×3 neighbourhood. The result is exact, because the filter multiplies the
    selected value by 1 and adds zeros. Every runtime supports convolutions; an exported unfold operation would consist
    of index arithmetic and Gather operators.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        convolution = nn.Conv2d(channels, _SIDE**2 * channels, _SIDE, stride=2, padding=1, groups=channels, bias=False)
        self.pick = with_role(convolution.requires_grad_(False), "depthwise")
        kernels = torch.eye(_SIDE**2).reshape(_SIDE**2, 1, _SIDE, _SIDE)
        self.pick.weight.copy_(kernels.repeat(channels, 1, 1, 1))

    def forward(self, lattice: Tensor) -> Tensor:
        picked: Tensor = self.pick(lattice)
        return picked.flatten(2).transpose(1, 2)


@torch.no_grad()
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
    changed = []
    for step, unfold in enumerate(model.unfolds):
        if not isinstance(unfold, Unfold):
            continue
        channels = model.spec.views if step == 0 else model.spec.token_dim
        replacement = UnfoldConvolution(channels)
        lattice = torch.randn(2, channels, 8, 8, generator=torch.Generator().manual_seed(step))
        if not replacement(lattice).equal(unfold(lattice)):
            raise FoldError(f"unfolds.{step}: the convolution that replaces this Unfold module changes the output")
        model.unfolds[step] = replacement
        changed.append(f"unfolds.{step}")
    if any(isinstance(module, Unfold) for module in model.modules()):
        raise FoldError("an Unfold module remains after every unfold of the model was replaced")
    return tuple(changed)


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
