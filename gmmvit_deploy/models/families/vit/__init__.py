"""ViT: a vision transformer on square images cut into square patches, with or without masks on attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from gmmvit_deploy.models.families.family import SMALL, Family, LastBlock, Network, last_of_blocks, plain_blocks
from gmmvit_deploy.models.families.vit.spec_and_source import PRESETS, RELEASED, ViTSpec
from gmmvit_deploy.models.specs import MaskSpec

if TYPE_CHECKING:
    from gmmvit_deploy.models.layers.model import Model


def _small(mask: MaskSpec) -> ViTSpec:
    return ViTSpec(**SMALL, head_dim=16, class_token=mask.kind == "plain", mask=mask)


def _variants() -> Mapping[str, ViTSpec]:
    return {"spt-lsa": replace(_small(MaskSpec()), spt=True, lsa=True)}


def _last_block(spec: ViTSpec) -> LastBlock:
    return last_of_blocks(spec, "first" if spec.pools_class_token else "mean")


def _other_pooling(model: Model) -> bool:
    spec = cast("ViTSpec", model.spec)
    if not spec.class_token:
        return False
    model.spec = replace(spec, pools_all=not spec.pools_all)
    return True


def _network() -> Network:
    from gmmvit_deploy.models.families.vit.model import ViT

    return Network(
        build=ViT, mistakes=(("class token and mean of the tokens exchanged in the pooling", _other_pooling),)
    )


VIT = Family(
    name="vit",
    spec=ViTSpec,
    network=_network,
    sources=(RELEASED,),
    presets=PRESETS,
    mask_kinds=("plain", "gmm", "elm"),
    small=_small,
    variants=_variants,
    blocks=plain_blocks,
    last_block=_last_block,
    default_resize="stretch-bilinear",
)
