"""EANet presets: architectures that the released code for classification names.

The released code calls these architectures T2T-ViT. The two forms of the token transformer that the code calls
``performer`` and ``transformer`` compute the same function, so ``T2t_vit_14`` and ``T2t_vit_t_14`` have equal specs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gmmvit_deploy.models.families.eanet.spec import EANetSpec
from gmmvit_deploy.models.specs import MaskSpec

__all__ = ["PRESETS"]

Preset = Callable[[int, int, MaskSpec], EANetSpec]


def _preset(dim: int, depth: int, heads: int, mlp_ratio: int) -> Preset:
    def spec(classes: int, image_size: int, mask: MaskSpec) -> EANetSpec:
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

    return spec


PRESETS: Mapping[str, Preset] = {
    "T2t_vit_7": _preset(256, 7, 4, 2),
    "T2t_vit_10": _preset(256, 10, 4, 2),
    "T2t_vit_12": _preset(256, 12, 4, 2),
    "T2t_vit_14": _preset(384, 14, 6, 3),
    "T2t_vit_t_14": _preset(384, 14, 6, 3),
    "T2t_vit_19": _preset(448, 19, 7, 3),
    "T2t_vit_t_19": _preset(448, 19, 7, 3),
    "T2t_vit_24": _preset(512, 24, 8, 3),
    "T2t_vit_t_24": _preset(512, 24, 8, 3),
    "T2t_vit_14_resnext": _preset(384, 14, 32, 3),
    "T2t_vit_14_wide": _preset(768, 4, 12, 3),
}
