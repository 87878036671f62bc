"""DeepViT: a vision transformer with Re-attention, which mixes the heads of the attention weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmmvit_deploy.models.families.deepvit.released import RELEASED, WITHOUT_REATTENTION
from gmmvit_deploy.models.families.deepvit.spec import PRESETS, DeepViTSpec
from gmmvit_deploy.models.families.family import Family, LastBlock, Mistake, OwnPass
from gmmvit_deploy.models.specs import MaskSpec

if TYPE_CHECKING:
    from gmmvit_deploy.models.layers.model import Model


def _build(spec: DeepViTSpec) -> Model:
    from gmmvit_deploy.models.families.deepvit.model import DeepViT

    return DeepViT(spec)


def _folding_passes() -> tuple[OwnPass, ...]:
    from gmmvit_deploy.models.families.deepvit.folding import merge_head_norm, merge_scale_adjustment, merge_stem_norms

    return (merge_head_norm, merge_scale_adjustment, merge_stem_norms)


def _engine_passes() -> tuple[OwnPass, ...]:
    from gmmvit_deploy.models.families.deepvit.folding import widen_reattention

    return (widen_reattention,)


def _small(mask: MaskSpec) -> DeepViTSpec:
    return DeepViTSpec(
        image_size=16,
        patch_size=4,
        classes=5,
        dim=32,
        depth=2,
        heads=2,
        mlp_dim=48,
        reattention=(False, True),
        stem_channels=8,
        qkv_bias=True,
        scale_adjustment=0.5,
        transform_scale=True,
        mask=mask,
    )


def _blocks(spec: DeepViTSpec) -> tuple[str, ...]:
    stem = ("stem",) if spec.stem_channels else ()
    return (*stem, "patch_embedding", *(f"blocks.{block}" for block in range(spec.depth)))


def _last_block(spec: DeepViTSpec) -> LastBlock:
    return LastBlock(name=f"blocks.{spec.depth - 1}", reads="first", tokens=spec.tokens)


def _mistakes() -> tuple[Mistake, ...]:
    from gmmvit_deploy.models.families.deepvit.mistakes import MISTAKES

    return MISTAKES


DEEPVIT = Family(
    name="deepvit",
    spec=DeepViTSpec,
    build=_build,
    sources=(RELEASED, WITHOUT_REATTENTION),
    presets=PRESETS,
    mask_kinds=("plain",),
    small=_small,
    blocks=_blocks,
    last_block=_last_block,
    folding_passes=_folding_passes,
    engine_passes=_engine_passes,
    mistakes=_mistakes,
)
