"""RMT (Retentive Networks Meet Vision Transformers): attention with a Manhattan decay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmmvit_deploy.models.families.family import Family, Mistake, OwnPass
from gmmvit_deploy.models.families.rmt.released import RELEASED
from gmmvit_deploy.models.families.rmt.spec import PRESETS, RMTSpec
from gmmvit_deploy.models.specs import MaskSpec

if TYPE_CHECKING:
    from gmmvit_deploy.models.layers.model import Model


def _build(spec: RMTSpec) -> Model:
    from gmmvit_deploy.models.families.rmt.model import RMT

    return RMT(spec)


def _small(mask: MaskSpec) -> RMTSpec:
    return RMTSpec(
        image_size=24,
        classes=5,
        dims=(32, 32),
        depths=(1, 1),
        heads=(2, 2),
        mlp_dims=(48, 64),
        decomposed_stages=(1,),
        layer_scale=(2,),
        release="2024",
        projection_dim=40,
        mask=mask,
    )


def _blocks(spec: RMTSpec) -> tuple[str, ...]:
    names = ["stem"]
    for stage, depth in enumerate(spec.depths):
        names += [f"stages.{stage}.blocks.{block}" for block in range(depth)]
        if stage < len(spec.depths) - 1:
            names.append(f"stages.{stage}.downsampling")
    return (*names, "projection") if spec.projection_dim else tuple(names)


def _folding_passes() -> tuple[OwnPass, ...]:
    from gmmvit_deploy.models.families.rmt import folding

    return (
        folding.merge_batch_norms,
        folding.merge_scale_into_keys,
        folding.merge_branch_scales,
        folding.merge_residual_convolutions,
        folding.fold_rotations,
        folding.merge_token_weight,
        folding.share_decays,
    )


def _engine_passes() -> tuple[OwnPass, ...]:
    from gmmvit_deploy.models.families.rmt.folding import join_rows

    return (join_rows,)


def _mistakes() -> tuple[Mistake, ...]:
    from gmmvit_deploy.models.families.rmt.mistakes import MISTAKES

    return MISTAKES


RMT = Family(
    name="rmt",
    spec=RMTSpec,
    build=_build,
    sources=(RELEASED,),
    presets=PRESETS,
    mask_kinds=("decay",),
    small=_small,
    blocks=_blocks,
    folding_passes=_folding_passes,
    engine_passes=_engine_passes,
    mistakes=_mistakes,
)
