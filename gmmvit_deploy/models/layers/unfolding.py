"""Unfold a lattice: collect the k×k neighbourhoods of a grid of pixels or tokens as tokens.

    out[b, (i, j), (c, r, s)] = x[b, c, stride·i + r − padding, stride·j + s − padding]        zero outside of x

`Unfold` is the operation of the trained network; `UnfoldConvolution` computes the same values with a convolution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.layers.roles import with_role


class Unfold(nn.Module):
    """(B, c, S, S) → (B, tokens, c·side²): the neighbourhoods of ``side`` × ``side`` entries, with zero padding."""

    operator_roles: ClassVar[Mapping[str, Role]] = {"im2col": "shape"}

    def __init__(self, side: int, *, stride: int, padding: int) -> None:
        super().__init__()
        self.side, self.stride, self.padding = side, stride, padding

    def forward(self, lattice: Float[Tensor, "batch channels s s"]) -> Float[Tensor, "batch n width"]:
        return nn.functional.unfold(lattice, self.side, stride=self.stride, padding=self.padding).transpose(1, 2)


def unfolded_filters(weight: Float[Tensor, "dim width"], side: int) -> Float[Tensor, "dim channels side side"]:
    """Return the weight of a linear layer on the output of `Unfold` as a filter for each output feature."""
    filters: Tensor = weight.detach().unflatten(1, (-1, side, side))
    return filters


class UnfoldConvolution(nn.Module):
    """An `Unfold` as a depthwise convolution with side² filters for each channel.

    The result is exact: each filter multiplies a value by 1 and adds zeros. Every runtime supports convolutions; an
    exported unfold operation would consist of index arithmetic and Gather operators.
    """

    def __init__(self, unfold: Unfold, channels: int) -> None:
        super().__init__()
        positions = unfold.side**2
        convolution = nn.Conv2d(
            channels,
            positions * channels,
            unfold.side,
            stride=unfold.stride,
            padding=unfold.padding,
            groups=channels,
            bias=False,
        )
        self.pick = with_role(convolution.requires_grad_(False), "depthwise")
        kernels = torch.eye(positions).reshape(positions, 1, unfold.side, unfold.side)
        with torch.no_grad():
            self.pick.weight.copy_(kernels.repeat(channels, 1, 1, 1))

    def forward(self, lattice: Float[Tensor, "batch channels s s"]) -> Float[Tensor, "batch n width"]:
        picked: Tensor = self.pick(lattice)
        return picked.flatten(2).transpose(1, 2)


@torch.no_grad()
def unfolds_as_convolutions(name: str, unfolds: nn.ModuleList, channels: Sequence[int]) -> tuple[str, ...]:
    """Replace each `Unfold` of a list by a convolution with one-hot filters.

    name: of the list in the model.  channels: of the lattice that each entry unfolds.
    Returns the names of the replaced modules.
    Errors: FoldError when a convolution and its `Unfold` differ on random inputs in any bit.
    """
    changed = []
    for step, unfold in enumerate(unfolds):
        if not isinstance(unfold, Unfold):
            continue
        replacement = UnfoldConvolution(unfold, channels[step])
        lattice = torch.randn(2, channels[step], 16, 16, generator=torch.Generator().manual_seed(step))
        if not replacement(lattice).equal(unfold(lattice)):
            raise FoldError(f"{name}.{step}: the convolution that replaces this Unfold module changes the output")
        unfolds[step] = replacement
        changed.append(f"{name}.{step}")
    return tuple(changed)
