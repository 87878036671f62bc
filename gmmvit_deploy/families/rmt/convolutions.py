"""Convolutions and BatchNorm of an RMT, and their folded forms.

h × w: the sides of a grid of tokens.  D: the number of features of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.layers.roles import with_role
from gmmvit_deploy.precision import Role

__all__ = ["BATCH_NORM_EPS", "BatchNorm", "GridConvolution", "NormedConvolution", "NormedLinear"]

BATCH_NORM_EPS = 1e-5


class BatchNorm(nn.Module):
    """BatchNorm in evaluation: y = weight · (x − running_mean) / √(running_var + eps) + bias, for each feature.

    Unlike `torch.nn.BatchNorm2d`, the module has no counter of batches, which evaluation does not read.
    """

    running_mean: Tensor
    running_var: Tensor
    role: Role = "norm"

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.eps = BATCH_NORM_EPS
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.register_buffer("running_mean", torch.zeros(dim))
        self.register_buffer("running_var", torch.ones(dim))

    def forward(self, x: Float[Tensor, "batch dim *rest"]) -> Float[Tensor, "batch dim *rest"]:
        return nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return (s, t) with y = s · x + t for each feature."""
        scale = self.weight / (self.running_var + self.eps).sqrt()
        return scale, self.bias - scale * self.running_mean


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
