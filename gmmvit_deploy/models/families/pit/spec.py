"""Spec of a PiT, and the presets: architectures that the released code of the masks names."""

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
    require_stages,
    require_tiling,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PiTSpec(ModelSpec):
    """PiT: a ViT with a class token in several stages; each later stage halves the grid and doubles the width.

    dim: the width of the first stage.  head_dim: the head dim, equal in all stages.
    depths, heads, mlp_dims: the number of blocks, the number of heads and the mlp width of each stage.
    spt, lsa: True for shifted patch tokenisation, and for locality self-attention, as in the formulas of the model.
    """

    family: ClassVar[str] = "pit"
    flags: ClassVar[tuple[str, ...]] = ("spt", "lsa")
    patch_size: int
    dim: int
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    head_dim: int
    mlp_dims: tuple[int, ...]
    spt: bool = False
    lsa: bool = False

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        require_counts(self, "patch_size", "dim", "depths", "heads", "head_dim", "mlp_dims")
        require_tiling(self.image_size, self.patch_size)
        require_stages(self.depths, self.heads, self.mlp_dims)
        require_no_mask_with(self, "spt", "lsa")
        for grid in self.grids[:-1] if self.spt else ():
            require(grid % 2 == 0, f"spt: expected grids that patches of 2×2 tokens tile, got {grid}×{grid} tokens")

    @property
    def grids(self) -> tuple[int, ...]:
        """The number of patches along a side of the grid of each stage.  Half of an odd number is rounded up."""
        grids = [self.image_size // self.patch_size]
        for _ in self.depths[1:]:
            grids.append((grids[-1] + 1) // 2)
        return tuple(grids)

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(self.dim << stage for stage in range(len(self.depths)))


def _pit(classes: int, image_size: int, mask: MaskSpec) -> PiTSpec:
    return PiTSpec(
        image_size=image_size,
        patch_size=4 if image_size == 64 else 2,
        classes=classes,
        dim=96,
        depths=(2, 6, 4),
        heads=(2, 4, 8),
        head_dim=48,
        mlp_dims=(192, 384, 768),
        mask=mask,
    )


PRESETS: Mapping[str, Callable[[int, int, MaskSpec], PiTSpec]] = {"pit": _pit}
