"""Spec of an RMT, and the presets: four sizes in three releases of the paper authors' code.

The names of the presets are those of the functions of the authors' code. The release of 2023 also has an ``RMT_S``,
which here is ``RMT_S_2023``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, TypeAlias, get_args

from gmmvit_deploy.models.specs import MaskKind, MaskSpec, ModelSpec, require, require_counts, require_stages

Release: TypeAlias = Literal["2023", "2024", "token_label"]
"""The releases of the paper authors' code, which build different networks.

2023: no rotary position embedding, no depthwise convolution in the MLP, a BatchNorm and the head at the end.
2024: rotary position embedding, a depthwise convolution in the MLP, and a projection with BatchNorm before the head.
token_label: the network of 2024 with a second head on every position, whose largest logits count half.
"""
RELEASES: tuple[Release, ...] = get_args(Release)
_MAX_CONSTANT_BYTES = 2 << 30  # folding and export hold several copies of the constants


@dataclass(frozen=True, slots=True, kw_only=True)
class RMTSpec(ModelSpec):
    """RMT: attention with a Manhattan decay on grids of tokens, in stages; each later stage halves the grid.

    dims, depths, heads, mlp_dims: the width, the number of blocks, the number of heads and the MLP width of each stage.
    decomposed_stages: the stages, counted from 1, whose attention runs along the rows and then along the columns of
    the grid. The other stages attend to the whole grid.
    layer_scale: the stages, counted from 1, whose blocks multiply their branches by a learned factor for each feature.
    release: a name of `RELEASES`.
    projection_dim: the width of the projection before the head; 0 in the release of 2023, which has no projection.
    Errors: SpecError as for `ModelSpec`, and when the constants for the image size would fill the memory.
    """

    family: ClassVar[str] = "rmt"
    mask_kinds: ClassVar[tuple[MaskKind, ...]] = ("decay",)
    dims: tuple[int, ...]
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    mlp_dims: tuple[int, ...]
    decomposed_stages: tuple[int, ...]
    layer_scale: tuple[int, ...]
    release: str
    projection_dim: int

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        require_counts(self, "dims", "depths", "heads", "mlp_dims")
        require_stages(self.depths, self.heads, self.mlp_dims)
        stages = len(self.depths)
        require(len(self.dims) == stages, f"expected a width for each of {stages} stages, got {len(self.dims)} widths")
        for name in ("decomposed_stages", "layer_scale"):
            value = getattr(self, name)
            require(
                all(isinstance(stage, int) and 1 <= stage <= stages for stage in value)
                and list(value) == sorted(set(value)),
                f"{name}: expected different stages from 1 to {stages}, in ascending order, got {value!r}",
            )
        require(self.release in RELEASES, f"release: expected one of {', '.join(RELEASES)}, got {self.release!r}")
        require(
            isinstance(self.projection_dim, int) and (self.projection_dim > 0) == (self.release != "2023"),
            f"projection_dim: expected {'0' if self.release == '2023' else 'at least 1'} in the release "
            f"{self.release}, got {self.projection_dim!r}",
        )
        require(self.dims[0] % 2 == 0, f"expected an even width in the first stage, got {self.dims[0]}")
        for stage, (dim, heads) in enumerate(zip(self.dims, self.heads, strict=True), start=1):
            require(
                dim % (2 * heads) == 0,
                f"stage {stage}: expected {heads} heads of an even head dim, got the width {dim}",
            )
        require(
            self.constant_bytes <= _MAX_CONSTANT_BYTES,
            f"the decays and rotations for images of {self.image_size}×{self.image_size} pixels take "
            f"{self.constant_bytes / 2**30:,.1f} GiB; expected at most {_MAX_CONSTANT_BYTES / 2**30:.0f} GiB",
            hint="type a smaller --image-size; decomposed stages, if training decomposed them, take less memory than "
            "stages that attend to the whole grid",
        )

    @property
    def rotates(self) -> bool:
        """Whether the attentions rotate Q and K by the position of the token (rotary position embedding)."""
        return self.release != "2023"

    @property
    def grids(self) -> tuple[int, ...]:
        """The number of tokens along a side of the grid of each stage: a convolution of stride 2 rounds up."""
        sides = [-(-self.image_size // 4)]
        while len(sides) < len(self.depths):
            sides.append(-(-sides[-1] // 2))
        return tuple(sides)

    @property
    def constant_bytes(self) -> int:
        """The bytes of the float32 constants that depend on the image size.

        Decays of a block: (H, n, n) for n tokens, or twice (H, side, side) in a decomposed stage.
        Rotation of a stage: cos and sin, each (n, D).
        """
        values = 0
        for stage, side in enumerate(self.grids):
            decay = 2 * side**2 if stage + 1 in self.decomposed_stages else side**4
            values += self.depths[stage] * self.heads[stage] * decay
            values += 2 * side**2 * self.dims[stage] if self.rotates else 0
        return 4 * values


IMAGE_SIZE = 224
"""The side in pixels of the images with which the paper's authors trained every preset."""
_PROJECTION_DIM = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    dims: tuple[int, ...]
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    mlp_ratios: tuple[int, ...]
    decomposed_stages: tuple[int, ...] = (1, 2, 3)
    layer_scale: tuple[int, ...] = ()


_T = _Size(
    dims=(64, 128, 256, 512),
    depths=(2, 2, 8, 2),
    heads=(4, 4, 8, 16),
    mlp_ratios=(3, 3, 3, 3),
    decomposed_stages=(1, 2),
)
_S = _Size(dims=(64, 128, 256, 512), depths=(3, 4, 18, 4), heads=(4, 4, 8, 16), mlp_ratios=(4, 4, 3, 3))
_B = _Size(
    dims=(80, 160, 320, 512), depths=(4, 8, 25, 8), heads=(5, 5, 10, 16), mlp_ratios=(4, 4, 3, 3), layer_scale=(3, 4)
)
_L = _Size(
    dims=(112, 224, 448, 640), depths=(4, 8, 25, 8), heads=(7, 7, 14, 20), mlp_ratios=(4, 4, 3, 3), layer_scale=(3, 4)
)
_NAMED: Mapping[str, _Size] = {
    "RMT_T": _T,
    "RMT_T3": _T,
    "RMT_S": _S,
    "RMT_B": _B,
    "RMT_M2": _B,
    "RMT_L": _L,
    "RMT_L6": _L,
}
"""Names of the functions of the paper authors' code, of all releases."""


def _spec(size: _Size, release: Release, classes: int, image_size: int, mask: MaskSpec) -> RMTSpec:
    return RMTSpec(
        image_size=image_size,
        classes=classes,
        dims=size.dims,
        depths=size.depths,
        heads=size.heads,
        mlp_dims=tuple(ratio * dim for ratio, dim in zip(size.mlp_ratios, size.dims, strict=True)),
        decomposed_stages=size.decomposed_stages,
        layer_scale=size.layer_scale,
        release=release,
        projection_dim=0 if release == "2023" else _PROJECTION_DIM,
        # Every RMT has the decay. The kind ``plain`` stands for a preset without another kind of mask.
        mask=MaskSpec(kind="decay") if mask.kind == "plain" else mask,
    )


def preset_named(name: str, release: Release, *, classes: int) -> RMTSpec | None:
    """Return the preset for `IMAGE_SIZE` by the name of its function in the authors' code, or None for another name."""
    size = _NAMED.get(name)
    return None if size is None else _spec(size, release, classes, IMAGE_SIZE, MaskSpec())


PRESETS: Mapping[str, Callable[[int, int, MaskSpec], RMTSpec]] = {
    "RMT_T3": partial(_spec, _T, "2024"),
    "RMT_S": partial(_spec, _S, "2024"),
    "RMT_M2": partial(_spec, _B, "2024"),
    "RMT_L6": partial(_spec, _L, "2024"),
    "RMT_T": partial(_spec, _T, "2023"),
    "RMT_S_2023": partial(_spec, _S, "2023"),
    "RMT_B": partial(_spec, _B, "2023"),
    "RMT_L": partial(_spec, _L, "2023"),
    "RMT_S_token_label": partial(_spec, _S, "token_label"),
    "RMT_M2_token_label": partial(_spec, _B, "token_label"),
    "RMT_L6_token_label": partial(_spec, _L, "token_label"),
}
