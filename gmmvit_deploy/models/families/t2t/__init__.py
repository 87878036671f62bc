"""T2T-ViT: single-head token transformers on overlapping patches, followed by a ViT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gmmvit_deploy.models.families.family import Family, LastBlock, Network, last_of_blocks
from gmmvit_deploy.models.families.t2t.spec_and_source import PRESETS, RELEASED, T2TSpec
from gmmvit_deploy.models.specs import MaskSpec


def _network() -> Network:
    from gmmvit_deploy.models.families.t2t.model import T2T, drop_unused
    from gmmvit_deploy.models.layers.patches import unfold_as_convolution

    return Network(build=T2T, folding_passes=(unfold_as_convolution, drop_unused))


def _small(mask: MaskSpec) -> T2TSpec:
    return T2TSpec(
        image_size=16,
        classes=5,
        dim=32,
        depth=2,
        heads=2,
        head_dim=16,
        mlp_dim=48,
        token_layers=1,
        token_dim=16,
        token_mlp_dim=16,
        mask=mask,
    )


def _variants() -> Mapping[str, T2TSpec]:
    plain = replace(_small(MaskSpec()), class_token=True)
    return {"spt-lsa": replace(plain, spt=True, lsa=True), "class-token": plain}


def _blocks(spec: T2TSpec) -> tuple[str, ...]:
    transformers = (f"token_transformers.{step}" for step in range(spec.token_layers))
    return (*transformers, *(f"blocks.{block}" for block in range(spec.depth)))


def _last_block(spec: T2TSpec) -> LastBlock | None:
    return last_of_blocks(spec) if spec.class_token else None  # without a class token, a norm precedes the mean


T2T = Family(
    name="t2t",
    spec=T2TSpec,
    network=_network,
    sources=(RELEASED,),
    presets=PRESETS,
    mask_kinds=("plain", "gmm", "elm"),
    small=_small,
    variants=_variants,
    last_block=_last_block,
    blocks=_blocks,
    default_resize="stretch-bilinear",
)
