"""Swin: attention within windows that shift in every other block, with or without Gaussian mixture masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gmmvit_deploy.models.families.family import Family, Network, Windows, stage_blocks
from gmmvit_deploy.models.families.swin.spec_and_source import PRESETS, RELEASED, SwinSpec
from gmmvit_deploy.models.specs import MaskSpec


def _network() -> Network:
    from gmmvit_deploy.models.families.swin.model import Swin, join_windows

    return Network(build=Swin, engine_passes=(join_windows,))


def _small(mask: MaskSpec) -> SwinSpec:
    return SwinSpec(
        image_size=16,
        patch_size=2,
        classes=5,
        dim=32,
        depths=(2, 1),
        heads=(2, 4),
        window=4,
        mlp_dims=(48, 64),
        mask=mask,
    )


def _variants() -> Mapping[str, SwinSpec]:
    return {"spt-lsa": replace(_small(MaskSpec()), depths=(2, 2), spt=True, lsa=True)}


def _blocks(spec: SwinSpec) -> tuple[str, ...]:
    return stage_blocks(spec.depths, between="stages.{}.merge")


def _windows(spec: SwinSpec) -> Mapping[str, Windows]:
    return {
        f"stages.{stage}.blocks.{block}.attention": Windows(
            grid=spec.grids[stage], window=spec.window, shift=spec.shift(stage, block)
        )
        for stage, depth in enumerate(spec.depths)
        for block in range(depth)
    }


SWIN = Family(
    name="swin",
    spec=SwinSpec,
    network=_network,
    sources=(RELEASED,),
    presets=PRESETS,
    mask_kinds=("plain", "gmm"),
    small=_small,
    variants=_variants,
    blocks=_blocks,
    windows=_windows,
    default_resize="stretch-bilinear",
)
