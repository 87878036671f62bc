"""Spec of a ViT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gmmvit_deploy.models.specs import ModelSpec, require, require_counts, require_no_mask_with, require_tiling

__all__ = ["ViTSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ViTSpec(ModelSpec):
    """A vision transformer on square images cut into square patches.

    class_token: True if a class token precedes the patches.
    pools_all: True if the head reads the mean of all tokens, including the class token. False if the head reads the
    class token, or the mean of the patches in a model without class token.
    spt: True for shifted patch tokenisation in place of a linear patch embedding.
    lsa: True for locality self-attention: learned temperatures, and no token attends to itself.
    """

    family: ClassVar[str] = "vit"
    flags: ClassVar[tuple[str, ...]] = ("spt", "lsa", "pools_all")
    patch_size: int
    dim: int
    depth: int
    heads: int
    head_dim: int
    mlp_dim: int
    class_token: bool
    spt: bool = False
    lsa: bool = False
    pools_all: bool = False

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        require_counts(self, "patch_size", "dim", "depth", "heads", "head_dim", "mlp_dim")
        require_tiling(self.image_size, self.patch_size)
        require_no_mask_with(self, "spt", "lsa")
        require(
            not (self.class_token and self.mask.kind != "plain"),
            "a masked ViT has no class token, because the mask covers only the patch grid",
        )
        require(not self.lsa or self.tokens > 1, "lsa: expected at least 2 tokens, because no token attends to itself")
        require(
            self.class_token or not self.pools_all,
            "pools_all is for a model with a class token; without class token, the head reads the mean of the patches",
        )

    @property
    def grid(self) -> int:
        """The number of patches along a side of the image."""
        return self.image_size // self.patch_size

    @property
    def pools_class_token(self) -> bool:
        """True if the head reads the class token, False if the head reads the mean of all tokens."""
        return self.class_token and not self.pools_all

    @property
    def tokens(self) -> int:
        """N: the number of patches, plus 1 if the model has a class token."""
        return self.grid**2 + int(self.class_token)
