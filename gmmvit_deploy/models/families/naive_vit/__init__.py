"""Naive ViT: the vision transformer of a widely copied tutorial, trained on MNIST."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmmvit_deploy.models.families.family import Family, Network, last_of_blocks, plain_blocks
from gmmvit_deploy.models.families.naive_vit.spec_and_source import PARAMETER_POSITIONS, TUTORIAL, NaiveViTSpec
from gmmvit_deploy.models.specs import MaskSpec

if TYPE_CHECKING:
    from gmmvit_deploy.models.layers.model import Model


def _small(mask: MaskSpec) -> NaiveViTSpec:
    return NaiveViTSpec(
        image_size=12, channels=1, patch_size=4, classes=5, dim=32, depth=2, heads=2, mlp_dim=32, mask=mask
    )


def _softmax_at_the_end(model: Model) -> bool:
    from torch import nn

    model.head = nn.Sequential(model.get_submodule("head"), nn.Softmax(dim=-1))
    return True


def _positions_without_class_token(model: Model) -> bool:
    positions = model.get_buffer("positions")
    positions.copy_(positions.roll(1, dims=1))
    return True


def _network() -> Network:
    from gmmvit_deploy.models.families.naive_vit.model import NaiveViT, stack_heads

    return Network(
        build=NaiveViT,
        folding_passes=(stack_heads,),
        mistakes=(
            ("the softmax of training in place of the logits", _softmax_at_the_end),
            ("positions counted from the first patch", _positions_without_class_token),
        ),
    )


NAIVE_VIT = Family(
    name="naive_vit",
    spec=NaiveViTSpec,
    network=_network,
    sources=(TUTORIAL, PARAMETER_POSITIONS),
    mask_kinds=("plain",),
    small=_small,
    blocks=plain_blocks,
    last_block=last_of_blocks,
    default_resize="stretch-bilinear",
)
