"""ViT presets: architectures that the paper authors' released code names.  The mask spec is a parameter.

The paper is "Toward a Deeper Understanding: RetNet Viewed through Convolution".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gmmvit_deploy.models.families.vit.spec import ViTSpec
from gmmvit_deploy.models.specs import MaskSpec

__all__ = ["PRESETS", "vit_d30_star_star", "vit_heat"]


def _vit(
    *, dim: int, depth: int, heads: int, classes: int, image_size: int, mask: MaskSpec, patch_size: int | None = None
) -> ViTSpec:
    return ViTSpec(
        image_size=image_size,
        patch_size=patch_size or (8 if image_size == 64 else 4),
        classes=classes,
        dim=dim,
        depth=depth,
        heads=heads,
        head_dim=dim // heads,
        mlp_dim=2 * dim,
        class_token=mask.kind == "plain",
        mask=mask,
    )


def vit(classes: int, image_size: int, mask: MaskSpec) -> ViTSpec:
    """Return the spec of the model that the paper calls ViT d9."""
    return _vit(dim=192, depth=9, heads=12, classes=classes, image_size=image_size, mask=mask)


def vit_base(classes: int, image_size: int, mask: MaskSpec) -> ViTSpec:
    patch_size = 2 if image_size == 32 else None
    return _vit(dim=256, depth=8, heads=4, classes=classes, image_size=image_size, mask=mask, patch_size=patch_size)


def vit_heat(classes: int, image_size: int, mask: MaskSpec) -> ViTSpec:
    return _vit(
        dim=192,
        depth=8,
        heads=6,
        classes=classes,
        image_size=image_size,
        mask=mask,
        patch_size={32: 2, 64: 4}.get(image_size),
    )


def vit_d6(classes: int, image_size: int, mask: MaskSpec) -> ViTSpec:
    return _vit(dim=252, depth=6, heads=12, classes=classes, image_size=image_size, mask=mask)


def vit_d15(classes: int, image_size: int, mask: MaskSpec) -> ViTSpec:
    return _vit(dim=144, depth=15, heads=12, classes=classes, image_size=image_size, mask=mask)


def vit_d30(classes: int, image_size: int, mask: MaskSpec) -> ViTSpec:
    return _vit(dim=72, depth=30, heads=12, classes=classes, image_size=image_size, mask=mask)


def vit_d30_star(classes: int, image_size: int, mask: MaskSpec) -> ViTSpec:
    """Return the spec of the model d30* in Table 3 of the paper."""
    return _vit(dim=108, depth=30, heads=12, classes=classes, image_size=image_size, mask=mask)


def vit_d30_star_star(classes: int, image_size: int, mask: MaskSpec) -> ViTSpec:
    """Return the spec of the model d30** in Table 4 of the paper."""
    return _vit(dim=192, depth=30, heads=12, classes=classes, image_size=image_size, mask=mask)


def vit_d60(classes: int, image_size: int, mask: MaskSpec) -> ViTSpec:
    return _vit(dim=72, depth=60, heads=12, classes=classes, image_size=image_size, mask=mask)


PRESETS: Mapping[str, Callable[[int, int, MaskSpec], ViTSpec]] = {
    "vit": vit,
    "vit-base": vit_base,
    "vit-heat": vit_heat,
    "vit_d6": vit_d6,
    "vit_d15": vit_d15,
    "vit_d30": vit_d30,
    "vit_d30*": vit_d30_star,
    "vit_d30**": vit_d30_star_star,
    "vit_d60": vit_d60,
}
