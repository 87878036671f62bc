"""Swin presets: architectures that the paper authors' released code names.  The mask spec is a parameter.

The paper is "Toward a Deeper Understanding: RetNet Viewed through Convolution".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gmmvit_deploy.models.families.swin.spec import SwinSpec
from gmmvit_deploy.models.specs import MaskSpec

__all__ = ["PRESETS"]


def _fine_patch(image_size: int) -> int:
    """Return the side of a patch in pixels: 4 for images of 64×64 pixels, otherwise 2."""
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


PRESETS: Mapping[str, Callable[[int, int, MaskSpec], SwinSpec]] = {"swin": swin}
