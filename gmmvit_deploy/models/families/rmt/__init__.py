"""RMT (Retentive Networks Meet Vision Transformers): attention with a Manhattan decay."""

from __future__ import annotations

from gmmvit_deploy.models.families.family import Family, Network, stage_blocks
from gmmvit_deploy.models.families.rmt.released import RELEASED
from gmmvit_deploy.models.families.rmt.spec import PRESETS, RMTSpec
from gmmvit_deploy.models.specs import MaskSpec


def _network() -> Network:
    from gmmvit_deploy.models.families.rmt import folding, model
    from gmmvit_deploy.models.families.rmt.mistakes import MISTAKES

    return Network(
        build=model.RMT,
        folding_passes=(
            folding.merge_batch_norms,
            folding.merge_scale_into_keys,
            folding.merge_branch_scales,
            folding.merge_residual_convolutions,
            folding.fold_rotations,
            folding.merge_token_weight,
            folding.share_decays,
        ),
        engine_passes=(folding.join_rows,),
        mistakes=MISTAKES,
    )


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
    names = stage_blocks(spec.depths, first="stem", between="stages.{}.downsampling")
    return (*names, "projection") if spec.projection_dim else names


RMT = Family(
    name="rmt",
    spec=RMTSpec,
    network=_network,
    sources=(RELEASED,),
    presets=PRESETS,
    mask_kinds=("decay",),
    small=_small,
    blocks=_blocks,
)
