"""Modules shared by the families: `PatchEmbedding`, `Mlp`, and pre-norm transformer blocks.

`PreNormBlock` has an attention of any kind; `Block` has a `MaskedAttention`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.layers.attention import MaskedAttention
from gmmvit_deploy.models.layers.roles import with_role
from gmmvit_deploy.models.scores.attention import AttentionScores

LAYER_NORM_EPS = 1e-5


def layer_norm(dim: int) -> nn.LayerNorm:
    return nn.LayerNorm(dim, eps=LAYER_NORM_EPS)


def flat_patches(images: Float[Tensor, "batch channels h w"], side: int) -> Float[Tensor, "batch n values"]:
    """Cut images into patches of ``side`` × ``side`` pixels, each flattened in the order (row, column, channel)."""
    patches: Tensor = images.unflatten(3, (-1, side)).unflatten(2, (-1, side))
    # (B, channel, row of the patch, row in the patch, column of the patch, column in the patch)
    return patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def linear_filters(weight: Float[Tensor, "dim values"], side: int) -> Float[Tensor, "dim channels p p"]:
    """Return the weight of a linear layer on `flat_patches` as a filter for each output feature."""
    filters: Tensor = weight.detach().unflatten(1, (side, side, -1)).permute(0, 3, 1, 2)
    return filters


class PatchEmbedding(nn.Module):
    """Apply a linear layer to each p×p patch, flattened in the order (row, column, channel).

    view_count: the number of images whose patches the layer reads together: 1, or more with shifted copies.
    """

    view_count: ClassVar[int] = 1

    def __init__(self, patch_size: int, dim: int, *, channels: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.project = with_role(nn.Linear(channels * patch_size**2, dim), "embedding")

    def forward(self, images: Float[Tensor, "batch channels side side"]) -> Float[Tensor, "batch n dim"]:
        projected: Tensor = self.project(flat_patches(images, self.patch_size))
        return projected

    def filters(self) -> Float[Tensor, "dim channels p p"]:
        """Return the filter of each feature of a token; the channels of a view follow those of the view before it."""
        return linear_filters(self.project.weight, self.patch_size)


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

    gives: the output of the block: ``tokens`` for all tokens, ``first`` for only the first token, ``mean`` for the mean
    of the tokens. Only `folding.last_block` sets ``first`` or ``mean``.
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
