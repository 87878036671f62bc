"""vit-pytorch: the networks DeepViT, ViT, SimpleViT and small-data ViT of a widely copied library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmmvit_deploy.models.families.family import Family, LastBlock, Mistake, OwnPass
from gmmvit_deploy.models.families.vit_pytorch.files import SOURCES
from gmmvit_deploy.models.families.vit_pytorch.spec import VitPytorchSpec
from gmmvit_deploy.models.specs import MaskSpec

if TYPE_CHECKING:
    from gmmvit_deploy.models.layers.model import Model


def _build(spec: VitPytorchSpec) -> Model:
    from gmmvit_deploy.models.families.vit_pytorch.model import VitPytorch

    return VitPytorch(spec)


def _small(mask: MaskSpec) -> VitPytorchSpec:
    return VitPytorchSpec(
        image_size=16,
        patch_size=4,
        classes=5,
        dim=32,
        depth=2,
        heads=2,
        head_dim=16,
        mlp_dim=48,
        attention="reattention",
        embedding="normed",
        output="bias",
        class_token=True,
        stored_positions=True,
        pool="mean",
        final_norm=False,
        head_norm=True,
        mask=mask,
    )


def _blocks(spec: VitPytorchSpec) -> tuple[str, ...]:
    return ("patch_embedding", *(f"blocks.{block}" for block in range(spec.depth)))


def _last_block(spec: VitPytorchSpec) -> LastBlock | None:
    if spec.pool == "mean" and spec.final_norm:
        return None  # the norm stands between the block and the mean, and does not commute with the mean
    return LastBlock(
        name=f"blocks.{spec.depth - 1}", reads="first" if spec.pool == "cls" else "mean", tokens=spec.tokens
    )


def _folding_passes() -> tuple[OwnPass, ...]:
    from gmmvit_deploy.models.families.vit_pytorch.folding import (
        centre_head_mixing,
        merge_head_norm_into_values,
        merge_scale_into_query,
    )

    return (centre_head_mixing, merge_head_norm_into_values, merge_scale_into_query)


def _mistakes() -> tuple[Mistake, ...]:
    from gmmvit_deploy.models.families.vit_pytorch.mistakes import MISTAKES

    return MISTAKES


VIT_PYTORCH = Family(
    name="vit_pytorch",
    spec=VitPytorchSpec,
    build=_build,
    sources=SOURCES,
    mask_kinds=("plain",),
    small=_small,
    blocks=_blocks,
    last_block=_last_block,
    folding_passes=_folding_passes,
    mistakes=_mistakes,
)
