"""Spec of a ViT.

XXX presets: ViT presets: architectures that the paper authors' released code names.  The mask spec is a parameter.

The paper is "Toward a Deeper Understanding: RetNet Viewed through Convolution".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from gmmvit_deploy.models.specs import (
    MaskSpec,
    ModelSpec,
    require,
    require_counts,
    require_no_mask_with,
    require_tiling,
)


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
