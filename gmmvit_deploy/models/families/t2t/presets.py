"""T2T-ViT presets: architectures that the paper authors' released code names.  The mask spec is a parameter.

The paper is "Toward a Deeper Understanding: RetNet Viewed through Convolution".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gmmvit_deploy.models.families.t2t.spec import T2TSpec
from gmmvit_deploy.models.specs import MaskSpec

__all__ = ["PRESETS"]


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


PRESETS: Mapping[str, Callable[[int, int, MaskSpec], T2TSpec]] = {"t2t": t2t}
