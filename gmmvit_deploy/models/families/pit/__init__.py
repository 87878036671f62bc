"""PiT: a ViT with a class token, in several stages with pooling between the stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gmmvit_deploy.models.families.family import Family, LastBlock, Network, stage_blocks
from gmmvit_deploy.models.families.pit.spec_and_source import PRESETS, RELEASED, PiTSpec
from gmmvit_deploy.models.specs import MaskSpec


def _network() -> Network:
    from gmmvit_deploy.models.families.pit.model import PiT

    return Network(build=PiT)


def _small(mask: MaskSpec) -> PiTSpec:
    return PiTSpec(
        image_size=16,
        patch_size=4,
        classes=5,
        dim=32,
        depths=(2, 1),
        heads=(2, 4),
        head_dim=16,
        mlp_dims=(48, 64),
        mask=mask,
    )


def _variants() -> Mapping[str, PiTSpec]:
    return {"spt-lsa": replace(_small(MaskSpec()), spt=True, lsa=True)}


def _blocks(spec: PiTSpec) -> tuple[str, ...]:
    return stage_blocks(spec.depths, block="{}", between="poolings.{}")


def _last_block(spec: PiTSpec) -> LastBlock:
    return LastBlock(
        name=f"stages.{len(spec.depths) - 1}.{spec.depths[-1] - 1}", reads="first", tokens=spec.grids[-1] ** 2 + 1
    )


PIT = Family(
    name="pit",
    spec=PiTSpec,
    network=_network,
    sources=(RELEASED,),
    presets=PRESETS,
    mask_kinds=("plain", "gmm", "elm"),
    small=_small,
    variants=_variants,
    blocks=_blocks,
    last_block=_last_block,
    default_resize="stretch-bilinear",
)
