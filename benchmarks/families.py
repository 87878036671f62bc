"""The five models of the paper as its released code names them, with a mask and without, and as that code computes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from gmmvit_deploy.models.attention import MaskedAttention, heads_of
from gmmvit_deploy.models.build import Model, model_from_spec
from gmmvit_deploy.presets import preset_spec
from gmmvit_deploy.specs import MaskSpec, ViTSpec

__all__ = ["FAMILIES", "EinsumAttention", "pair"]

FAMILIES = ("vit", "swin", "cait", "pit", "t2t")


def pair(family: str) -> dict[str, Model]:
    """A GMM model with random weights, and the same without its masks."""
    torch.manual_seed(0)
    spec = preset_spec(family, classes=10, image_size=32, mask=MaskSpec(kind="gmm", kernels=5))
    plain = replace(spec, mask=MaskSpec())
    if isinstance(plain, ViTSpec):
        plain = replace(plain, class_token=False)
    masked, twin = model_from_spec(spec).eval(), model_from_spec(plain).eval()
    twin.load_state_dict({name: t for name, t in masked.state_dict().items() if ".mask." not in name})
    return {"gmm": masked, "plain": twin}


class EinsumAttention(nn.Module):
    """The products of `MaskedAttention` written as Einsum; everything else is the original's."""

    def __init__(self, original: MaskedAttention) -> None:
        super().__init__()
        self.original = original

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attention = self.original
        query, key, value = (heads_of(part, attention.heads) for part in attention.qkv(x).chunk(3, dim=-1))
        weights = torch.softmax(attention.scores.masked(torch.einsum("bhid,bhjd->bhij", query, key)), dim=-1)
        mixed = torch.einsum("bhij,bhjd->bhid", weights, value)
        return attention.out(mixed.transpose(1, 2).flatten(2))
