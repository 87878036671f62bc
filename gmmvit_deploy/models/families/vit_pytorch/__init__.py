"""vit-pytorch: the networks DeepViT, ViT, SimpleViT and small-data ViT of a widely copied library."""

from __future__ import annotations

from gmmvit_deploy.models.families.family import SMALL, Family, LastBlock, Network, last_of_blocks, plain_blocks
from gmmvit_deploy.models.families.vit_pytorch.spec_and_source import SOURCES, VitPytorchSpec
from gmmvit_deploy.models.specs import MaskSpec


def _network() -> Network:
    from gmmvit_deploy.models.families.vit_pytorch import folding
    from gmmvit_deploy.models.families.vit_pytorch.mistakes import MISTAKES
    from gmmvit_deploy.models.families.vit_pytorch.model import VitPytorch

    return Network(
        build=VitPytorch,
        folding_passes=(
            folding.centre_head_mixing,
            folding.merge_head_norm_into_values,
            folding.merge_scale_into_query,
        ),
        mistakes=MISTAKES,
    )


def _small(mask: MaskSpec) -> VitPytorchSpec:
    return VitPytorchSpec(
        **SMALL,
        head_dim=16,
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


def _last_block(spec: VitPytorchSpec) -> LastBlock | None:
    if spec.pool == "mean" and spec.final_norm:
        return None  # the norm stands between the block and the mean, and does not commute with the mean
    return last_of_blocks(spec, "first" if spec.pool == "cls" else "mean")


VIT_PYTORCH = Family(
    name="vit_pytorch",
    spec=VitPytorchSpec,
    network=_network,
    sources=SOURCES,
    mask_kinds=("plain",),
    small=_small,
    blocks=plain_blocks,
    last_block=_last_block,
)
