"""PiT presets: architectures that the paper authors' released code names.  The mask spec is a parameter.

The paper is "Toward a Deeper Understanding: RetNet Viewed through Convolution".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gmmvit_deploy.models.families.pit.spec import PiTSpec
from gmmvit_deploy.models.specs import MaskSpec

__all__ = ["PRESETS"]


def _fine_patch(image_size: int) -> int:
    """Return the side of a patch in pixels: 4 for images of 64×64 pixels, otherwise 2."""
    return 4 if image_size == 64 else 2


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


PRESETS: Mapping[str, Callable[[int, int, MaskSpec], PiTSpec]] = {"pit": pit}
