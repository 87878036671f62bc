"""ViT: vision transformer: plain (without masks), masked, or with shifted patches (SPT) and local attention (LSA).

x = patches(image)·W + b  [class token first]  + position
x = x + attention(norm(x));  x = x + mlp(norm(x))          depth times, pre-norm
logits = head(norm(mean of the tokens))                    without a class token (masked models)
logits = head(norm(class token))                           with a class token (plain models of the paper authors' code)
logits = head(norm(mean of all tokens))                    with a class token that is pooled like a patch (vit-pytorch)

SPT replaces the patch embedding (`layers.patches`), and LSA the steps on the scores (`scores.locality`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.families.vit import ViTSpec
from gmmvit_deploy.models.layers.blocks import Block, layer_norm
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.layers.patches import PatchEmbedding, ShiftedPatches
from gmmvit_deploy.models.layers.roles import with_role
from gmmvit_deploy.models.scores.attention import AttentionScores, scaled_scores
from gmmvit_deploy.models.scores.locality import locality_scores
from gmmvit_deploy.models.scores.masks import mask_from_spec
from gmmvit_deploy.models.specs import MEAN_OF_TOKENS


class ViT(Model):
    """Vision transformer, plain or masked."""

    operator_roles: ClassVar[Mapping[str, Role]] = {"add": "bias", "mean": "pooling"}

    spec: ViTSpec

    def __init__(self, spec: ViTSpec) -> None:
        super().__init__()
        self.spec = spec
        embedding = ShiftedPatches if spec.spt else PatchEmbedding
        self.patch_embedding = embedding(spec.patch_size, spec.dim, channels=spec.channels)
        self.class_token = nn.Parameter(torch.randn(1, 1, spec.dim)) if spec.class_token else None
        self.position_embedding = nn.Parameter(0.02 * torch.randn(1, spec.tokens, spec.dim))
        self.blocks = nn.ModuleList(
            Block(dim=spec.dim, heads=spec.heads, head_dim=spec.head_dim, mlp_dim=spec.mlp_dim, scores=_scores(spec))
            for _ in range(spec.depth)
        )
        self.head_norm = layer_norm(spec.dim)
        self.head = with_role(nn.Linear(spec.dim, spec.classes), "head")

    @property
    def pooling(self) -> str:
        return super().pooling if self.spec.pools_class_token else MEAN_OF_TOKENS

    def logits_and_features(
        self, images: Float[Tensor, "batch channels side side"]
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch dim"]]:
        x = self.patch_embedding(images)
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = x + self.position_embedding
        for block in self.blocks:
            x = block(x)
        pooled = x[:, 0] if self.spec.pools_class_token else x.mean(dim=1)
        features: Tensor = self.head_norm(pooled)
        return self.head(features), features


def _scores(spec: ViTSpec) -> AttentionScores:
    if spec.lsa:
        return locality_scores(heads=spec.heads, head_dim=spec.head_dim, tokens=spec.tokens)
    return scaled_scores(spec.head_dim**-0.5, mask=mask_from_spec(spec.mask, heads=spec.heads, grid=spec.grid))
