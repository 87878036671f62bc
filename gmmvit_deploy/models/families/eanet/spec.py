"""Spec of an EANet, and the presets: architectures that the released code for classification names.

The released code calls these architectures T2T-ViT. The two forms of the token transformer that the code calls
``performer`` and ``transformer`` compute the same function, so ``T2t_vit_14`` and ``T2t_vit_t_14`` have equal specs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from gmmvit_deploy.models.specs import MaskKind, MaskSpec, ModelSpec, require, require_counts

_PATCH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EANetSpec(ModelSpec):
    """EANet: token transformers on overlapping patches, then blocks, all with external attention.

    heads: as the released code is given it; the attention has ``heads · expansion`` heads of ``dim / heads`` features.
    expansion: the width of the attention divided by ``dim``.
    slots, token_slots: the number of slots of the memories in the blocks, and in the token transformers.
    token_dim: the width of the token transformers.
    """

    family: ClassVar[str] = "eanet"
    mask_kinds: ClassVar[tuple[MaskKind, ...]] = ("plain",)
    dim: int
    depth: int
    heads: int
    mlp_dim: int
    token_dim: int
    expansion: int = 4
    slots: int = 64
    token_slots: int = 128

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        require_counts(self, "dim", "depth", "heads", "mlp_dim", "token_dim", "expansion", "slots", "token_slots")
        require(
            self.image_size % _PATCH == 0,
            f"image side {self.image_size}: expected a multiple of {_PATCH}, because the network divides the side by "
            "4, 2 and 2",
        )
        require(self.dim % self.heads == 0, f"the width {self.dim} is not a multiple of {self.heads} heads")

    @property
    def grids(self) -> tuple[int, int, int]:
        """The number of tokens along a side of the grid: for both token transformers, then for the blocks."""
        return self.image_size // 4, self.image_size // 8, self.image_size // _PATCH

    @property
    def tokens(self) -> int:
        """N: the number of tokens of the blocks, with the class token."""
        return self.grids[-1] ** 2 + 1

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


def _spec(dim: int, depth: int, heads: int, mlp_ratio: int, classes: int, image_size: int, mask: MaskSpec) -> EANetSpec:
    return EANetSpec(
        image_size=image_size,
        classes=classes,
        dim=dim,
        depth=depth,
        heads=heads,
        mlp_dim=mlp_ratio * dim,
        token_dim=64,
        mask=mask,
    )


PRESETS: Mapping[str, Callable[[int, int, MaskSpec], EANetSpec]] = {
    "T2t_vit_7": partial(_spec, 256, 7, 4, 2),
    "T2t_vit_10": partial(_spec, 256, 10, 4, 2),
    "T2t_vit_12": partial(_spec, 256, 12, 4, 2),
    "T2t_vit_14": partial(_spec, 384, 14, 6, 3),
    "T2t_vit_t_14": partial(_spec, 384, 14, 6, 3),
    "T2t_vit_19": partial(_spec, 448, 19, 7, 3),
    "T2t_vit_t_19": partial(_spec, 448, 19, 7, 3),
    "T2t_vit_24": partial(_spec, 512, 24, 8, 3),
    "T2t_vit_t_24": partial(_spec, 512, 24, 8, 3),
    "T2t_vit_14_resnext": partial(_spec, 384, 14, 32, 3),
    "T2t_vit_14_wide": partial(_spec, 768, 4, 12, 3),
}
