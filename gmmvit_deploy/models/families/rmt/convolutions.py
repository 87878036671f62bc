"""Convolutions of an RMT, also with BatchNorm, and their folded forms.

h × w: the sides of a grid of tokens.  D: the number of features of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.models.layers.batch_norm import BatchNorm
from gmmvit_deploy.models.layers.roles import with_role
from gmmvit_deploy.precision import Role

__all__ = ["GridConvolution", "NormedConvolution", "NormedLinear"]


class NormedConvolution(nn.Module):
    """A 3×3 convolution with padding 1, then BatchNorm.  ``norm`` is None after folding.

    forward: (B, channels, height, width) → (B, D, ⌈height/stride⌉, ⌈width/stride⌉).
    """

    def __init__(self, channels: int, dim: int, *, stride: int, role: Role) -> None:
        super().__init__()
        self.convolution = with_role(nn.Conv2d(channels, dim, 3, stride=stride, padding=1), role)
        self.norm: BatchNorm | None = BatchNorm(dim)

    def forward(self, lattice: Tensor) -> Tensor:
        out: Tensor = self.convolution(lattice)
        return out if self.norm is None else self.norm(out)


class NormedLinear(nn.Module):
    """A linear layer, then BatchNorm over its outputs.  ``norm`` is None after folding.

    forward: (B, h, w, D) → (B, h, w, P).
    """

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.linear = with_role(nn.Linear(dim, out), "projection")
        self.norm: BatchNorm | None = BatchNorm(out)

    def forward(self, x: Float[Tensor, "batch h w dim"]) -> Float[Tensor, "batch h w out"]:
        out: Tensor = self.linear(x)
        return out if self.norm is None else self.norm(out.movedim(-1, 1)).movedim(1, -1)


class GridConvolution(nn.Module):
    """A depthwise convolution on a grid of tokens, with the padding that keeps the size of the grid.

    adds_input: True if the output is x + convolution(x). Folding adds 1 to the centre of each kernel instead.
    """

    operator_roles: ClassVar[Mapping[str, Role]] = {"add": "residual"}

    def __init__(self, dim: int, kernel: int, *, adds_input: bool) -> None:
        super().__init__()
        self.adds_input = adds_input
        self.convolution = with_role(nn.Conv2d(dim, dim, kernel, padding=kernel // 2, groups=dim), "depthwise")

    def forward(self, x: Float[Tensor, "batch h w dim"]) -> Float[Tensor, "batch h w dim"]:
        out: Tensor = self.convolution(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return x + out if self.adds_input else out
