"""The vision transformer of a widely copied tutorial, trained on MNIST.

x = [class token, patches(image)·W + b] + P
P[i, j] = sin(i / 10000^(j/D)) for even j,  cos(i / 10000^((j−1)/D)) for odd j
x = x + attention(norm(x));  x = x + mlp(norm(x))          depth times, pre-norm
logits = head(x of the class token)                        no norm before the head

In P, i is the token (0 is the class token), j is the feature, and D is the width. Head h computes Q, K and V from
features h·d … (h+1)·d − 1 of the normed tokens, where d is the head dim. The attention has no output projection. If the
checkpoint holds P, the model uses the values of the checkpoint, also if the values differ from the sinusoids. The
tutorial's network ends in a softmax over the classes; this model omits the softmax, because the outputs are logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.families.naive_vit import NaiveViTSpec
from gmmvit_deploy.models.layers.attention import MaskedAttention
from gmmvit_deploy.models.layers.blocks import PreNormBlock
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.layers.patches import PatchEmbedding
from gmmvit_deploy.models.layers.positions import sinusoidal_positions
from gmmvit_deploy.models.layers.proofs import random_values, require_same_output
from gmmvit_deploy.models.layers.roles import with_role
from gmmvit_deploy.models.scores.attention import scaled_scores


class HeadwiseProjection(nn.Module):
    """Compute Q, K and V with a separate linear map for each head, which reads only the d features of the head.

    weight: (3, H, d, d), indexed [Q or K or V, head, input feature, output feature].  bias: (3, H, d).
    """

    operator_roles: ClassVar[Mapping[str, Role]] = {"matmul": "projection", "add": "bias"}

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.randn(3, heads, head_dim, head_dim) * head_dim**-0.5)
        self.bias = nn.Parameter(torch.zeros(3, heads, head_dim))

    def forward(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch n stacked"]:
        # (B, n, 1, H, 1, d) @ (3, H, d, d)  →  (B, n, 3, H, 1, d)
        columns: Tensor = x.unflatten(-1, (1, self.heads, 1, -1))
        return ((columns @ self.weight).squeeze(-2) + self.bias).flatten(-3)


class NaiveViT(Model):
    """Vision transformer with headwise projections and fixed positions: sinusoids, or those of the checkpoint."""

    operator_roles: ClassVar[Mapping[str, Role]] = {"add": "bias"}

    spec: NaiveViTSpec
    positions: Tensor

    def __init__(self, spec: NaiveViTSpec) -> None:
        super().__init__()
        self.spec = spec
        self.patch_embedding = PatchEmbedding(spec.patch_size, spec.dim, channels=spec.channels)
        self.class_token = nn.Parameter(torch.rand(1, 1, spec.dim))
        # The sizes determine the sinusoids, so the state dict omits the buffer if the checkpoint has no positions.
        positions = sinusoidal_positions(spec.tokens, spec.dim)
        self.register_buffer("positions", positions, persistent=spec.stored_positions)
        self.blocks = nn.ModuleList(_block(spec) for _ in range(spec.depth))
        self.head = with_role(nn.Linear(spec.dim, spec.classes), "head")

    def logits_and_features(
        self, images: Float[Tensor, "batch channels side side"]
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch dim"]]:
        x = self.patch_embedding(images)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        features: Tensor = x[:, 0]
        return self.head(features), features


def _block(spec: NaiveViTSpec) -> PreNormBlock:
    scores = scaled_scores(spec.head_dim**-0.5)
    attention = MaskedAttention(
        dim=spec.dim, heads=spec.heads, head_dim=spec.head_dim, scores=scores, projects_output=False
    )
    attention.qkv = HeadwiseProjection(spec.heads, spec.head_dim)
    return PreNormBlock(dim=spec.dim, mlp_dim=spec.mlp_dim, attention=attention)


@torch.no_grad()
def stack_heads(model: nn.Module) -> tuple[str, ...]:
    """Replace each `HeadwiseProjection` by a single linear layer, which our kernels, GPU engines and quantisers expect.

    The maps W_h of the heads for Q, K or V  →  a block-diagonal matrix with the blocks W_h, and zeros elsewhere.
    """
    changed = []
    for name, projection in list(model.named_modules()):
        if isinstance(projection, HeadwiseProjection):
            linear = _stacked(projection)
            tokens = random_values(2, 5, linear.in_features)
            require_same_output(f"{name}: stack_heads", projection, linear, tokens, rounding=1e-12)
            model.set_submodule(name, linear)
            changed.append(name)
    return tuple(changed)


def _stacked(projection: HeadwiseProjection) -> nn.Linear:
    parts, heads, head_dim, _ = projection.weight.shape
    dim = heads * head_dim
    linear = nn.Linear(dim, parts * dim).requires_grad_(False)
    by_part = [torch.block_diag(*(weight.t() for weight in part)) for part in projection.weight]
    linear.weight.copy_(torch.cat(by_part))
    linear.bias.copy_(projection.bias.flatten())
    return with_role(linear, "projection")
