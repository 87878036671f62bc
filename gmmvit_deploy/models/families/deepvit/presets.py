"""DeepViT presets: architectures that the paper authors' code names.

Source: "DeepViT: Towards Deeper Vision Transformer" (arXiv 2103.11886), code zhoudaquan/dvit_repo. All presets have 12
heads, patches of 16 × 16 pixels and an mlp of width 3·D, with D the width of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gmmvit_deploy.models.families.deepvit.spec import DeepViTSpec
from gmmvit_deploy.models.specs import MaskSpec

__all__ = ["IMAGE_SIZES", "PRESETS"]

_STEM_CHANNELS = 64


def _deepvit(
    *,
    dim: int,
    depth: int,
    classes: int,
    image_size: int,
    mask: MaskSpec,
    mixed: int | None = None,
    transform_scale: bool = False,
) -> DeepViTSpec:
    """Return the spec of a preset.

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
        stem_channels=0 if mixed is None else _STEM_CHANNELS,
        qkv_bias=True,
        scale_adjustment=1.0 if mixed is None else 0.5,
        transform_scale=transform_scale,
        mask=mask,
    )


def deepvit_16b(classes: int, image_size: int, mask: MaskSpec) -> DeepViTSpec:
    return _deepvit(dim=384, depth=16, classes=classes, image_size=image_size, mask=mask)


def deepvit_24b(classes: int, image_size: int, mask: MaskSpec) -> DeepViTSpec:
    return _deepvit(dim=384, depth=24, classes=classes, image_size=image_size, mask=mask)


def deepvit_32b(classes: int, image_size: int, mask: MaskSpec) -> DeepViTSpec:
    return _deepvit(dim=384, depth=32, classes=classes, image_size=image_size, mask=mask)


def deepvit_s(classes: int, image_size: int, mask: MaskSpec) -> DeepViTSpec:
    return _deepvit(dim=396, depth=16, mixed=5, transform_scale=True, classes=classes, image_size=image_size, mask=mask)


def deepvit_l(classes: int, image_size: int, mask: MaskSpec) -> DeepViTSpec:
    return _deepvit(dim=420, depth=32, mixed=12, classes=classes, image_size=image_size, mask=mask)


PRESETS: Mapping[str, Callable[[int, int, MaskSpec], DeepViTSpec]] = {
    "deepvit_patch16_224_re_attn_16b": deepvit_16b,
    "deepvit_patch16_224_re_attn_24b": deepvit_24b,
    "deepvit_patch16_224_re_attn_32b": deepvit_32b,
    "deepvit_S": deepvit_s,
    "deepvit_L": deepvit_l,
    "deepvit_L_384": deepvit_l,
}
IMAGE_SIZES: Mapping[str, int] = {name: 384 if name == "deepvit_L_384" else 224 for name in PRESETS}
"""Preset → the side of the images in pixels with which the authors' code trains the preset."""
