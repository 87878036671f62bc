"""Modules shared by the families: `BatchNorm`, `Mlp`, and pre-norm transformer blocks.

`PreNormBlock` has an attention of any kind; `Block` has a `MaskedAttention`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.layers.attention import MaskedAttention
from gmmvit_deploy.models.layers.roles import with_role
from gmmvit_deploy.models.scores.attention import AttentionScores

LAYER_NORM_EPS = 1e-5


def layer_norm(dim: int) -> nn.LayerNorm:
    return nn.LayerNorm(dim, eps=LAYER_NORM_EPS)


class Mlp(nn.Sequential):
    """A linear layer, the exact (erf) GELU, and a second linear layer."""

    operator_roles: ClassVar[Mapping[str, Role]] = {"mean": "pooling"}

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__(
            with_role(nn.Linear(dim, hidden_dim), "projection"),
            nn.GELU(),
            with_role(nn.Linear(hidden_dim, dim), "projection"),
        )

    def mean_over_tokens(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch 1 dim"]:
        """Return the mean of the outputs over the tokens: the second layer, which commutes with it, runs on it."""
        first, gelu, second = self
        mean: Tensor = second(gelu(first(x)).mean(dim=1, keepdim=True))
        return mean


class PreNormBlock(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    gives: all tokens, or, after `folding.fold.narrow_last_block`, only the first token or the mean of the tokens.
    """

    gives: Literal["tokens", "first", "mean"]
    operator_roles: ClassVar[Mapping[str, Role]] = {"add": "residual", "mean": "pooling"}

    def __init__(self, *, dim: int, mlp_dim: int, attention: nn.Module) -> None:
        super().__init__()
        self.gives = "tokens"
        self.attention_norm = layer_norm(dim)
        self.attention = attention
        self.mlp_norm = layer_norm(dim)
        self.mlp = Mlp(dim, mlp_dim)

    def forward(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch given dim"]:
        x = x + self.attention(self.attention_norm(x))
        if self.gives == "mean":
            return x.mean(dim=1, keepdim=True) + self.mlp.mean_over_tokens(self.mlp_norm(x))
        if self.gives == "first":
            x = x[:, :1]
        return self.with_mlp(x)

    def with_mlp(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch n dim"]:
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Block(PreNormBlock):
    """Pre-norm transformer block with a `MaskedAttention`."""

    attention: MaskedAttention

    def __init__(self, *, dim: int, heads: int, head_dim: int, mlp_dim: int, scores: AttentionScores) -> None:
        attention = MaskedAttention(
            dim=dim,
            heads=heads,
            head_dim=head_dim,
            scores=scores,
            # In the paper authors' code, attention with a single head of the full width has no output projection.
            projects_output=not (heads == 1 and head_dim == dim),
        )
        super().__init__(dim=dim, mlp_dim=mlp_dim, attention=attention)


BATCH_NORM_EPS = 1e-5


class BatchNorm(nn.Module):
    """BatchNorm in evaluation: y = weight · (x − running_mean) / √(running_var + eps) + bias, for each feature."""

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


def with_other_epsilon(model: nn.Module, norms: type[nn.Module] = BatchNorm) -> bool:
    """Make a mistake: give each norm the default epsilon of another framework, 1e-3.  Return False without norms."""
    changed = False
    for norm in model.modules():
        if isinstance(norm, norms):
            norm.eps = 1e-3  # type: ignore[assignment]  # nn.Module types every attribute as a tensor or module
            changed = True
    return changed
