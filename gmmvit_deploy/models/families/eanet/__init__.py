"""EANet: T2T-ViT whose attentions are external attentions, which read a trained memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmmvit_deploy.models.families.eanet.released import PERFORMER, TRANSFORMER
from gmmvit_deploy.models.families.eanet.spec import PRESETS, EANetSpec
from gmmvit_deploy.models.families.family import Family, LastBlock, OwnPass
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


def _softmax_over_slots(model: Model) -> bool:
    from gmmvit_deploy.models.families.eanet.mistakes import softmax_over_slots

    return softmax_over_slots(model)


def _softmax_over_slots_without_biases(model: Model) -> bool:
    from gmmvit_deploy.models.families.eanet.mistakes import softmax_over_slots_without_biases

    return softmax_over_slots_without_biases(model)


def _no_slot_sum(model: Model) -> bool:
    from gmmvit_deploy.models.families.eanet.mistakes import no_slot_sum

    return no_slot_sum(model)


def _memory_without_strides(model: Model) -> bool:
    from gmmvit_deploy.models.families.eanet.mistakes import memory_without_strides

    return memory_without_strides(model)


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
    mistakes=(
        ("softmax over the slots in place of the tokens", _softmax_over_slots),
        (
            "softmax over the slots in place of the tokens, without the biases that folding drops",
            _softmax_over_slots_without_biases,
        ),
        ("no division by the sum over the slots", _no_slot_sum),
        ("the second memory of the token transformers read without its strides", _memory_without_strides),
    ),
)
