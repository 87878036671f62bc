"""DeepViT: a vision transformer with Re-attention, which mixes the heads of the attention weights."""

from __future__ import annotations

from gmmvit_deploy.models.families.deepvit.released import RELEASED, WITHOUT_REATTENTION
from gmmvit_deploy.models.families.deepvit.spec import PRESETS, DeepViTSpec
from gmmvit_deploy.models.families.family import SMALL, Family, Network, last_of_blocks, plain_blocks
from gmmvit_deploy.models.specs import MaskSpec


def _network() -> Network:
    from gmmvit_deploy.models.families.deepvit import folding
    from gmmvit_deploy.models.families.deepvit.mistakes import MISTAKES
    from gmmvit_deploy.models.families.deepvit.model import DeepViT

    return Network(
        build=DeepViT,
        folding_passes=(folding.merge_head_norm, folding.merge_scale_adjustment, folding.merge_stem_norms),
        mistakes=MISTAKES,
    )


def _small(mask: MaskSpec) -> DeepViTSpec:
    return DeepViTSpec(
        **SMALL,
        reattention=(False, True),
        stem_channels=8,
        qkv_bias=True,
        scale_adjustment=0.5,
        transform_scale=True,
        mask=mask,
    )


def _blocks(spec: DeepViTSpec) -> tuple[str, ...]:
    return (*(("stem",) if spec.stem_channels else ()), *plain_blocks(spec))


DEEPVIT = Family(
    name="deepvit",
    spec=DeepViTSpec,
    network=_network,
    sources=(RELEASED, WITHOUT_REATTENTION),
    presets=PRESETS,
    mask_kinds=("plain",),
    small=_small,
    blocks=_blocks,
    last_block=last_of_blocks,
)
