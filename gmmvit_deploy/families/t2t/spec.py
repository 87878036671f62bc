"""Spec of a T2T-ViT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gmmvit_deploy.specs import ModelSpec, require, require_counts

__all__ = ["T2TSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class T2TSpec(ModelSpec):
    """T2T-ViT: single-head token transformers on overlapping patches, followed by a ViT.

    dim, depth, heads, head_dim, mlp_dim: the sizes of the ViT.
    token_layers: the number of token transformers.
    token_dim, token_mlp_dim: the output width and the mlp width of the token transformers.
    """

    family: ClassVar[str] = "t2t"
    dim: int
    depth: int
    heads: int
    head_dim: int
    mlp_dim: int
    token_layers: int
    token_dim: int
    token_mlp_dim: int

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        require_counts(
            self,
            "dim",
            "depth",
            "heads",
            "head_dim",
            "mlp_dim",
            "token_layers",
            "token_dim",
            "token_mlp_dim",
        )
        require(
            self.image_size % 2 ** (self.token_layers + 1) == 0,
            f"image side {self.image_size}: expected a multiple of {2 ** (self.token_layers + 1)}, "
            f"because the network halves the grid {self.token_layers + 1} times",
        )

    @property
    def grids(self) -> tuple[int, ...]:
        """The number of tokens along a side of the grid: for each token transformer, then for the ViT."""
        return tuple(self.image_size >> step for step in range(1, self.token_layers + 2))
