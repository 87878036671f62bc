"""Spec of a naive ViT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gmmvit_deploy.models.specs import ModelSpec, require, require_counts, require_tiling


@dataclass(frozen=True, slots=True, kw_only=True)
class NaiveViTSpec(ModelSpec):
    """The tutorial's ViT: class token, fixed positions, and separate maps of Q, K and V for each head.

    stored_positions: True if the checkpoint holds the positions, False if the positions are the sinusoids that follow
    from the number of tokens and the width.
    """

    family: ClassVar[str] = "naive_vit"
    patch_size: int
    dim: int
    depth: int
    heads: int
    mlp_dim: int
    stored_positions: bool = False

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        require_counts(self, "patch_size", "dim", "depth", "heads", "mlp_dim")
        require_tiling(self.image_size, self.patch_size)
        require(self.dim % self.heads == 0, f"the width {self.dim} is not a multiple of {self.heads} heads")
        require(self.mask.kind == "plain", "a naive ViT has no mask on its attention scores")

    @property
    def grid(self) -> int:
        """The number of patches along a side of the image."""
        return self.image_size // self.patch_size

    @property
    def tokens(self) -> int:
        """N: the number of patches, plus 1 for the class token."""
        return self.grid**2 + 1

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads
