"""Spec of a ViT, and the presets: architectures that the released code of the masks names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import ClassVar

from gmmvit_deploy.models.specs import MaskSpec, PatchSpec, require, require_counts, require_no_mask_with


@dataclass(frozen=True, slots=True, kw_only=True)
class ViTSpec(PatchSpec):
    """A vision transformer on square images cut into square patches.

    class_token: True if a class token precedes the patches.
    pools_all: True if the head reads the mean of all tokens, including the class token. False if the head reads the
    class token, or the mean of the patches in a model without class token.
    spt, lsa: True for shifted patch tokenisation, and for locality self-attention, as in the formulas of the model.
    """

    family: ClassVar[str] = "vit"
    flags: ClassVar[tuple[str, ...]] = ("spt", "lsa", "pools_all")
    head_dim: int
    class_token: bool
    spt: bool = False
    lsa: bool = False
    pools_all: bool = False

    def __post_init__(self) -> None:
        PatchSpec.__post_init__(self)
        require_counts(self, "head_dim")
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
    def pools_class_token(self) -> bool:
        """True if the head reads the class token, False if the head reads the mean of all tokens."""
        return self.class_token and not self.pools_all


def _spec(
    dim: int,
    depth: int,
    classes: int,
    image_size: int,
    mask: MaskSpec,
    *,
    heads: int = 12,
    patch_sizes: Mapping[int, int] = MappingProxyType({}),
) -> ViTSpec:
    """Return a preset.  patch_sizes: side of the images → side of a patch; else 8 for images of 64 pixels, or 4."""
    return ViTSpec(
        image_size=image_size,
        patch_size=patch_sizes.get(image_size, 8 if image_size == 64 else 4),
        classes=classes,
        dim=dim,
        depth=depth,
        heads=heads,
        head_dim=dim // heads,
        mlp_dim=2 * dim,
        class_token=mask.kind == "plain",
        mask=mask,
    )


PRESETS: Mapping[str, Callable[[int, int, MaskSpec], ViTSpec]] = {
    "vit": partial(_spec, 192, 9),  # the paper's ViT d9
    "vit-base": partial(_spec, 256, 8, heads=4, patch_sizes={32: 2}),
    "vit-heat": partial(_spec, 192, 8, heads=6, patch_sizes={32: 2, 64: 4}),
    "vit_d6": partial(_spec, 252, 6),
    "vit_d15": partial(_spec, 144, 15),
    "vit_d30": partial(_spec, 72, 30),
    "vit_d30*": partial(_spec, 108, 30),  # d30* in Table 3 of the paper
    "vit_d30**": partial(_spec, 192, 30),  # d30** in Table 4 of the paper
    "vit_d60": partial(_spec, 72, 60),
}
