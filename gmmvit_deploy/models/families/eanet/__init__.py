"""EANet: T2T-ViT whose attentions are external attentions, which read a trained memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmmvit_deploy.models.families.eanet.released import PERFORMER, TRANSFORMER
from gmmvit_deploy.models.families.eanet.spec import PRESETS, EANetSpec
from gmmvit_deploy.models.families.family import Family, LastBlock, Mistake, OwnPass
from gmmvit_deploy.models.specs import MaskSpec

if TYPE_CHECKING:
    from gmmvit_deploy.models.layers.model import Model


def _build(spec: EANetSpec) -> Model:
    from gmmvit_deploy.models.families.eanet.model import EANet

    return EANet(spec)


def _folding_passes() -> tuple[OwnPass, ...]:
    from gmmvit_deploy.models.families.eanet.folding import (
        class_token_as_row,
        merge_memories,
        merge_token_memories,
        unfold_as_convolution,
    )

    return (unfold_as_convolution, merge_token_memories, class_token_as_row, merge_memories)


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


def _last_block(spec: EANetSpec) -> LastBlock:
    return LastBlock(name=f"blocks.{spec.depth - 1}", reads="first", tokens=spec.tokens)


def _mistakes() -> tuple[Mistake, ...]:
    from gmmvit_deploy.models.families.eanet.mistakes import MISTAKES

    return MISTAKES


EANET = Family(
    name="eanet",
    spec=EANetSpec,
    build=_build,
    sources=(PERFORMER, TRANSFORMER),
    presets=PRESETS,
    mask_kinds=("plain",),
    small=_small,
    blocks=_blocks,
    last_block=_last_block,
    folding_passes=_folding_passes,
    mistakes=_mistakes,
)
