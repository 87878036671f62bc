"""Spec of a DeepViT, and the presets: architectures that the paper authors' code names.

Source: "DeepViT: Towards Deeper Vision Transformer" (arXiv 2103.11886), code zhoudaquan/dvit_repo. All presets have 12
heads, patches of 16 × 16 pixels and an mlp of width 3·D, with D the width of the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from gmmvit_deploy.models.specs import MaskKind, MaskSpec, PatchSpec, require


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepViTSpec(PatchSpec):
    """DeepViT: a ViT with a class token whose blocks mix the heads of the attention weights (Re-attention).

    reattention: for each block, True if the block mixes its heads after softmax.
    stem_channels: the channels of the convolution stem; 0 if a single convolution embeds the patches.
    scale_adjustment: a, the factor before each norm of a block, by which the output of each branch is divided.
    transform_scale: True if the mixed weights are also multiplied by d^(−1/2), with d the head dim.
    """

    family: ClassVar[str] = "deepvit"
    mask_kinds: ClassVar[tuple[MaskKind, ...]] = ("plain",)
    reattention: tuple[bool, ...]
    stem_channels: int
    qkv_bias: bool
    scale_adjustment: float
    transform_scale: bool

    def __post_init__(self) -> None:
        PatchSpec.__post_init__(self)
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


def _spec(
    dim: int,
    depth: int,
    classes: int,
    image_size: int,
    mask: MaskSpec,
    *,
    mixed: int | None = None,
    transform_scale: bool = False,
) -> DeepViTSpec:
    """Return a preset.

    mixed: the number of last blocks with re-attention, in a network with a convolution stem; None for a network without
    a stem, in which every block has re-attention.
    """
    plain = 0 if mixed is None else depth - mixed
    return DeepViTSpec(
        image_size=image_size,
        patch_size=16,
        classes=classes,
        dim=dim,
        depth=depth,
        heads=12,
        mlp_dim=3 * dim,
        reattention=(False,) * plain + (True,) * (depth - plain),
        stem_channels=0 if mixed is None else 64,
        qkv_bias=True,
        scale_adjustment=1.0 if mixed is None else 0.5,
        transform_scale=transform_scale,
        mask=mask,
    )


PRESETS: Mapping[str, Callable[[int, int, MaskSpec], DeepViTSpec]] = {
    "deepvit_patch16_224_re_attn_16b": partial(_spec, 384, 16),
    "deepvit_patch16_224_re_attn_24b": partial(_spec, 384, 24),
    "deepvit_patch16_224_re_attn_32b": partial(_spec, 384, 32),
    "deepvit_S": partial(_spec, 396, 16, mixed=5, transform_scale=True),
    "deepvit_L": partial(_spec, 420, 32, mixed=12),
    "deepvit_L_384": partial(_spec, 420, 32, mixed=12),
}
IMAGE_SIZES: Mapping[str, int] = {name: 384 if name == "deepvit_L_384" else 224 for name in PRESETS}
"""Preset → the side of the images in pixels with which the authors' code trains the preset."""
