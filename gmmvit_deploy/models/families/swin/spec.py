"""Spec of a Swin, and the presets: architectures that the released code of the masks names."""

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
class SwinSpec(ModelSpec):
    """Swin: attention within windows that shift in blocks with an odd index; each later stage halves the grid.

    window: the number of tokens along a side of a window.
    dim: the width of the first stage; the width doubles from stage to stage.
    depths, heads, mlp_dims: the number of blocks, the number of heads and the mlp width of each stage.
    spt, lsa: True for shifted patch tokenisation, and for locality self-attention, as in the formulas of the model.
    """

    family: ClassVar[str] = "swin"
    flags: ClassVar[tuple[str, ...]] = ("spt", "lsa")
    patch_size: int
    dim: int
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    window: int
    mlp_dims: tuple[int, ...]
    spt: bool = False
    lsa: bool = False

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        require_counts(self, "patch_size", "dim", "depths", "heads", "window", "mlp_dims")
        require_tiling(self.image_size, self.patch_size)
        require_stages(self.depths, self.heads, self.mlp_dims)
        require(self.mask.kind != "elm", "a Swin supports no element-wise mask (ELM); expected plain or gmm")
        require_no_mask_with(self, "spt", "lsa")
        require(
            not self.lsa or self.window > 1, "lsa: expected windows of at least 2×2 tokens: no token attends to itself"
        )
        for stage, heads in enumerate(self.heads):
            grid, dim = self.grids[stage], self.dims[stage]
            require(dim % heads == 0, f"stage {stage}: the width {dim} is not a multiple of {heads} heads")
            require(
                grid % self.window == 0 and grid >= self.window,
                f"stage {stage}: windows of {self.window}×{self.window} tokens do not tile the {grid}×{grid} grid",
            )

    @property
    def grids(self) -> tuple[int, ...]:
        """The number of tokens along a side of the grid of each stage."""
        return tuple((self.image_size // self.patch_size) >> stage for stage in range(len(self.depths)))

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(self.dim << stage for stage in range(len(self.depths)))

    def shift(self, stage: int, block: int) -> int:
        """Return by how many tokens a block with an odd index rolls the grid, if its stage has several windows."""
        return self.window // 2 if block % 2 and self.grids[stage] > self.window else 0


def _swin(classes: int, image_size: int, mask: MaskSpec) -> SwinSpec:
    return SwinSpec(
        image_size=image_size,
        patch_size=4 if image_size == 64 else 2,
        classes=classes,
        dim=96,
        depths=(2, 6, 4),
        heads=(3, 6, 12),
        window=4,
        mlp_dims=(192, 384, 768),
        mask=mask,
    )


PRESETS: Mapping[str, Callable[[int, int, MaskSpec], SwinSpec]] = {"swin": _swin}
