"""RMT presets: architectures that the paper authors' code names.

Four sizes in three releases. The names are those of the functions of the authors' code. The release of 2023 also has
an ``RMT_S``, which here is ``RMT_S_2023``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gmmvit_deploy.models.families.rmt.spec import Release, RMTSpec
from gmmvit_deploy.models.specs import MaskSpec

__all__ = ["IMAGE_SIZE", "PRESETS", "preset_named"]

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
    """Return the preset of a release for `IMAGE_SIZE`, by the name of its function in the paper authors' code.

    Returns None if the authors' code has no function with this name.
    """
    size = _NAMED.get(name)
    return None if size is None else _spec(size, release, classes, IMAGE_SIZE, MaskSpec())


def _preset(size: _Size, release: Release) -> Callable[[int, int, MaskSpec], RMTSpec]:
    def build(classes: int, image_size: int, mask: MaskSpec) -> RMTSpec:
        return _spec(size, release, classes, image_size, mask)

    return build


PRESETS: Mapping[str, Callable[[int, int, MaskSpec], RMTSpec]] = {
    "RMT_T3": _preset(_T, "2024"),
    "RMT_S": _preset(_S, "2024"),
    "RMT_M2": _preset(_B, "2024"),
    "RMT_L6": _preset(_L, "2024"),
    "RMT_T": _preset(_T, "2023"),
    "RMT_S_2023": _preset(_S, "2023"),
    "RMT_B": _preset(_B, "2023"),
    "RMT_L": _preset(_L, "2023"),
    "RMT_S_token_label": _preset(_S, "token_label"),
    "RMT_M2_token_label": _preset(_B, "token_label"),
    "RMT_L6_token_label": _preset(_L, "token_label"),
}
