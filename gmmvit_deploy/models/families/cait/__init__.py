"""CaiT: a vision transformer with head mixing, LayerScale, and class blocks after the patch blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gmmvit_deploy.models.families.cait.spec_and_source import (
    PRENORM,
    PRESETS,
    RELEASED,
    SPT_LSA_PLAIN,
    VIT_PYTORCH,
    CaiTSpec,
)
from gmmvit_deploy.models.families.family import SMALL, Family, Network
from gmmvit_deploy.models.specs import MaskSpec


def _network() -> Network:
    from gmmvit_deploy.models.families.cait.folding import drop_remainder, merge_layer_scale, widen_heads
    from gmmvit_deploy.models.families.cait.model import MISTAKES, CaiT

    return Network(
        build=CaiT,
        folding_passes=(drop_remainder, merge_layer_scale),
        engine_passes=(widen_heads,),
        mistakes=MISTAKES,
    )


def _small(mask: MaskSpec) -> CaiTSpec:
    return CaiTSpec(**SMALL, class_depth=1, head_dim=16, mask=mask)


def _variants() -> Mapping[str, CaiTSpec]:
    return {"spt-lsa": replace(_small(MaskSpec()), spt=True, lsa=True)}


def _blocks(spec: CaiTSpec) -> tuple[str, ...]:
    patches = (f"patch_blocks.{block}" for block in range(spec.depth))
    return ("patch_embedding", *patches, *(f"class_blocks.{block}" for block in range(spec.class_depth)))


CAIT = Family(
    name="cait",
    spec=CaiTSpec,
    network=_network,
    sources=(RELEASED, SPT_LSA_PLAIN, PRENORM, VIT_PYTORCH),
    presets=PRESETS,
    mask_kinds=("plain", "gmm", "elm"),
    small=_small,
    variants=_variants,
    blocks=_blocks,
    default_resize="stretch-bilinear",
)
