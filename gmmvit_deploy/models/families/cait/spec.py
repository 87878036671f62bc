"""Spec of a CaiT, and the presets: architectures that the released code of the masks names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from gmmvit_deploy.models.specs import MaskSpec, PatchSpec, require_counts, require_no_mask_with


@dataclass(frozen=True, slots=True, kw_only=True)
class CaiTSpec(PatchSpec):
    """CaiT: patch blocks with optional masks and head mixing, then class blocks with head mixing.

    depth, class_depth: the number of patch blocks and of class blocks.
    spt, lsa: True for shifted patch tokenisation, and for locality self-attention, as in the formulas of the model.
    normed_patches: True if norms surround the linear layer of the patch embedding, as in vit-pytorch.
    attends_to_itself: True if the class token attends to its normed self and to the patches, as in vit-pytorch.
    """

    family: ClassVar[str] = "cait"
    flags: ClassVar[tuple[str, ...]] = ("spt", "lsa", "normed_patches", "attends_to_itself")
    class_depth: int
    head_dim: int
    spt: bool = False
    lsa: bool = False
    normed_patches: bool = False
    attends_to_itself: bool = False

    def __post_init__(self) -> None:
        PatchSpec.__post_init__(self)
        require_counts(self, "class_depth", "head_dim")
        require_no_mask_with(self, "spt", "lsa")

    @property
    def tokens(self) -> int:
        """N: the number of tokens of the patch blocks, without the class token."""
        return self.grid**2


def _spec(dim: int, classes: int, image_size: int, mask: MaskSpec) -> CaiTSpec:
    return CaiTSpec(
        image_size=image_size,
        patch_size=8 if image_size == 64 else 4,
        classes=classes,
        dim=dim,
        depth=24,
        class_depth=2,
        heads=4,
        head_dim=64,
        mlp_dim=384,
        mask=mask,
    )


PRESETS: Mapping[str, Callable[[int, int, MaskSpec], CaiTSpec]] = {
    "cait": partial(_spec, 192),
    "cait-tiny": partial(_spec, 108),
}
