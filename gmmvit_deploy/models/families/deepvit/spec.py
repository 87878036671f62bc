"""Spec of a DeepViT."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from gmmvit_deploy.models.specs import MaskKind, ModelSpec, require, require_counts, require_tiling

__all__ = ["DeepViTSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepViTSpec(ModelSpec):
    """DeepViT: a ViT with a class token whose blocks mix the heads of the attention weights (Re-attention).

    reattention: for each block, True if the block mixes its heads after softmax.
    stem_channels: the channels of the convolution stem; 0 if a single convolution embeds the patches.
    scale_adjustment: a, the factor before each norm of a block, by which the output of each branch is divided.
    transform_scale: True if the mixed weights are also multiplied by d^(−1/2), with d the head dim.
    """

    family: ClassVar[str] = "deepvit"
    mask_kinds: ClassVar[tuple[MaskKind, ...]] = ("plain",)
    patch_size: int
    dim: int
    depth: int
    heads: int
    mlp_dim: int
    reattention: tuple[bool, ...]
    stem_channels: int
    qkv_bias: bool
    scale_adjustment: float
    transform_scale: bool

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        require_counts(self, "patch_size", "dim", "depth", "heads", "mlp_dim")
        require_tiling(self.image_size, self.patch_size)
        require(self.dim % self.heads == 0, f"heads: expected a divisor of the dim {self.dim}, got {self.heads}")
        require(
            len(self.reattention) == self.depth and all(isinstance(mixes, bool) for mixes in self.reattention),
            f"reattention: expected true or false for each of {self.depth} blocks, got {self.reattention!r}",
        )
        require(
            isinstance(self.stem_channels, int) and self.stem_channels >= 0,
            f"stem_channels: expected a whole number of at least 0, got {self.stem_channels!r}",
        )
        require(
            not self.stem_channels or self.patch_size % 2 == 0,
            f"patch size: expected an even number, because the convolution stem has stride 2, got {self.patch_size}",
        )
        require(
            isinstance(self.scale_adjustment, int | float) and 0 < self.scale_adjustment < math.inf,
            f"scale_adjustment: expected a number above 0, got {self.scale_adjustment!r}",
        )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def grid(self) -> int:
        """The number of patches along a side of the image."""
        return self.image_size // self.patch_size

    @property
    def tokens(self) -> int:
        """N: the number of patches, plus 1 for the class token."""
        return self.grid**2 + 1
