"""The models that the paper's released code has a name for, as functions that return their spec.

A file never needs one: its shapes tell everything but, sometimes, the heads. Kernels are not part
of a preset, since the mask says them.
"""

from __future__ import annotations

from collections.abc import Callable

from gmmvit_deploy.errors import SpecError
from gmmvit_deploy.specs import CaiTSpec, MaskSpec, ModelSpec, PiTSpec, SwinSpec, T2TSpec, ViTSpec

__all__ = ["PRESETS", "preset_spec"]


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
    """The paper's ViT d9."""
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
    """d30* of the paper's Table 3."""
    return _vit(dim=108, depth=30, heads=12, classes=classes, image_size=image_size, mask=mask)


def vit_d30_star_star(classes: int, image_size: int, mask: MaskSpec) -> ViTSpec:
    """d30** of the paper's Table 4."""
    return _vit(dim=192, depth=30, heads=12, classes=classes, image_size=image_size, mask=mask)


def vit_d60(classes: int, image_size: int, mask: MaskSpec) -> ViTSpec:
    return _vit(dim=72, depth=60, heads=12, classes=classes, image_size=image_size, mask=mask)


def _fine_patch(image_size: int) -> int:
    """Patch side of Swin and PiT: 2 at 32×32, 4 at 64×64."""
    return 4 if image_size == 64 else 2


def swin(classes: int, image_size: int, mask: MaskSpec) -> SwinSpec:
    return SwinSpec(
        image_size=image_size,
        patch_size=_fine_patch(image_size),
        classes=classes,
        dim=96,
        depths=(2, 6, 4),
        heads=(3, 6, 12),
        window=4,
        mlp_dims=(192, 384, 768),
        mask=mask,
    )


def _cait(*, dim: int, classes: int, image_size: int, mask: MaskSpec) -> CaiTSpec:
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


def cait(classes: int, image_size: int, mask: MaskSpec) -> CaiTSpec:
    return _cait(dim=192, classes=classes, image_size=image_size, mask=mask)


def cait_tiny(classes: int, image_size: int, mask: MaskSpec) -> CaiTSpec:
    return _cait(dim=108, classes=classes, image_size=image_size, mask=mask)


def pit(classes: int, image_size: int, mask: MaskSpec) -> PiTSpec:
    return PiTSpec(
        image_size=image_size,
        patch_size=_fine_patch(image_size),
        classes=classes,
        dim=96,
        depths=(2, 6, 4),
        heads=(2, 4, 8),
        head_dim=48,
        mlp_dims=(192, 384, 768),
        mask=mask,
    )


def t2t(classes: int, image_size: int, mask: MaskSpec) -> T2TSpec:
    return T2TSpec(
        image_size=image_size,
        classes=classes,
        dim=256,
        depth=12,
        heads=4,
        head_dim=64,
        mlp_dim=512,
        token_layers=2 if image_size == 64 else 1,
        token_dim=64,
        token_mlp_dim=64,
        mask=mask,
    )


PRESETS: dict[str, Callable[[int, int, MaskSpec], ModelSpec]] = {
    "vit": vit,
    "vit-base": vit_base,
    "vit-heat": vit_heat,
    "vit_d6": vit_d6,
    "vit_d15": vit_d15,
    "vit_d30": vit_d30,
    "vit_d30*": vit_d30_star,
    "vit_d30**": vit_d30_star_star,
    "vit_d60": vit_d60,
    "swin": swin,
    "cait": cait,
    "cait-tiny": cait_tiny,
    "pit": pit,
    "t2t": t2t,
}


def preset_spec(name: str, *, classes: int, image_size: int, mask: MaskSpec) -> ModelSpec:
    """The spec of a named model.  Errors: SpecError on a name that is not in `PRESETS`."""
    if name not in PRESETS:
        raise SpecError(f"preset {name!r} is not known", hint=f"known: {', '.join(PRESETS)}")
    return PRESETS[name](classes, image_size, mask)
