"""The networks DeepViT, ViT, SimpleViT and small-data ViT of the library vit-pytorch.

x = [class token; patches(image)] + position
x = x + attention(norm(x));  x = x + mlp(norm(x))          depth times, pre-norm
x = norm(x)                                                if the network has a final norm
logits = head(norm(pooled x))                              the norm only if the network has a norm before the head

The pooled x is the class token, or the mean of all tokens including the class token. `attention` and `embedding`
describe the kinds of attention and of patch embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.models.families.vit_pytorch.attention import attention_from_spec
from gmmvit_deploy.models.families.vit_pytorch.embedding import embedding_from_spec, sinusoidal_positions
from gmmvit_deploy.models.families.vit_pytorch.spec import VitPytorchSpec
from gmmvit_deploy.models.layers.blocks import Block, layer_norm
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.layers.roles import with_role
from gmmvit_deploy.precision import Role

__all__ = ["VitPytorch"]


class VitPytorch(Model):
    """A network of vit-pytorch.

    pools: what the head reads, ``cls`` or ``mean``; equal to the field ``pool`` of the spec.
    forward: images (B, c, S, S), normalised, float32 → logits (B, C).
    """

    operator_roles: ClassVar[Mapping[str, Role]] = {"add": "bias", "mean": "pooling"}

    spec: VitPytorchSpec
    position_embedding: Tensor

    def __init__(self, spec: VitPytorchSpec) -> None:
        super().__init__()
        self.spec = spec
        self.pools = spec.pool
        self.patch_embedding = embedding_from_spec(spec)
        self.class_token = nn.Parameter(torch.randn(1, 1, spec.dim)) if spec.class_token else None
        if spec.stored_positions:
            self.position_embedding = nn.Parameter(0.02 * torch.randn(1, spec.tokens, spec.dim))
        else:  # the sizes determine the sinusoids, so the state dict omits the buffer
            self.register_buffer("position_embedding", sinusoidal_positions(spec.grid, spec.dim), persistent=False)
        self.blocks = nn.ModuleList(_block(spec) for _ in range(spec.depth))
        self.final_norm = layer_norm(spec.dim) if spec.final_norm else None
        self.head_norm = layer_norm(spec.dim) if spec.head_norm else None
        self.head = with_role(nn.Linear(spec.dim, spec.classes), "head")

    def logits_and_features(
        self, images: Float[Tensor, "batch channels side side"]
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch dim"]]:
        x: Tensor = self.patch_embedding(images)
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = x + self.position_embedding
        for block in self.blocks:
            x = block(x)
        if self.final_norm is not None:
            x = self.final_norm(x)
        pooled = x[:, 0] if self.pools == "cls" else x.mean(dim=1)
        if self.head_norm is not None:
            pooled = self.head_norm(pooled)
        return self.head(pooled), pooled


def _block(spec: VitPytorchSpec) -> Block:
    attention = attention_from_spec(spec)
    block = Block(dim=spec.dim, heads=spec.heads, head_dim=spec.head_dim, mlp_dim=spec.mlp_dim, scores=attention.scores)
    block.attention = attention
    return block
