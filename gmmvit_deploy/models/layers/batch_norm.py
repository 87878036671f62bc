"""BatchNorm in evaluation, with the stored statistics of training."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.inference.precision import Role

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

    def affine(self) -> tuple[Float[Tensor, " dim"], Float[Tensor, " dim"]]:
        """Return (s, t) with y = s · x + t for each feature, in float64."""
        scale = self.weight.double() / (self.running_var.double() + self.eps).sqrt()
        return scale, self.bias.double() - scale * self.running_mean.double()
