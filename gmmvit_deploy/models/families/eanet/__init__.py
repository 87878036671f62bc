"""EANet: T2T-ViT whose attentions are external attentions, which read a trained memory."""

from __future__ import annotations

from gmmvit_deploy.models.families.eanet.spec_and_source import PERFORMER, PRESETS, TRANSFORMER, EANetSpec
from gmmvit_deploy.models.families.family import Family, Network, last_of_blocks
from gmmvit_deploy.models.specs import MaskSpec


def _network() -> Network:
    from gmmvit_deploy.models.families.eanet import folding
    from gmmvit_deploy.models.families.eanet.model import MISTAKES, EANet
    from gmmvit_deploy.models.layers.patches import unfold_as_convolution

    return Network(
        build=EANet,
        folding_passes=(
            unfold_as_convolution,
            folding.merge_token_memories,
            folding.class_token_as_row,
            folding.merge_memories,
        ),
        mistakes=MISTAKES,
    )


def _small(mask: MaskSpec) -> EANetSpec:
    return EANetSpec(
        image_size=32,
        classes=5,
        dim=24,
        depth=2,
        heads=2,
        mlp_dim=32,
        token_dim=16,
        expansion=4,
        slots=16,
        token_slots=24,
        mask=mask,
    )


def _blocks(spec: EANetSpec) -> tuple[str, ...]:
    return (*(f"token_transformers.{step}" for step in range(2)), *(f"blocks.{block}" for block in range(spec.depth)))


EANET = Family(
    name="eanet",
    spec=EANetSpec,
    network=_network,
    sources=(PERFORMER, TRANSFORMER),
    presets=PRESETS,
    mask_kinds=("plain",),
    small=_small,
    blocks=_blocks,
    last_block=last_of_blocks,
)
