"""CaiT presets: architectures that the paper authors' released code names.  The mask spec is a parameter.

The paper is "Toward a Deeper Understanding: RetNet Viewed through Convolution".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gmmvit_deploy.models.families.cait.spec import CaiTSpec
from gmmvit_deploy.models.specs import MaskSpec

__all__ = ["PRESETS"]


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


PRESETS: Mapping[str, Callable[[int, int, MaskSpec], CaiTSpec]] = {"cait": cait, "cait-tiny": cait_tiny}
