"""The networks DeepViT, ViT, SimpleViT and small-data ViT of the library vit-pytorch.

x = [class token; patches(image)] + position
x = x + attention(norm(x));  x = x + mlp(norm(x))          depth times, pre-norm
x = norm(x)                                                if the network has a final norm
logits = head(norm(pooled x))                              the norm only if the network has a norm before the head

The pooled x is the class token, or the mean of all tokens including the class token.

Attention: out = A V. W mixes the heads, and norm is a LayerNorm over the heads of each pair of tokens (i, j).

plain         A = softmax(Q Kᵀ · d^(−1/2))
lsa           A = softmax(T · Q Kᵀ + B)               T = exp(temperature), B = −∞ on the diagonal and 0 elsewhere
reattention   A = norm(Wᵀ · softmax(Q Kᵀ · d^(−1/2)))

Patch embedding:

linear    x = W · patch + b
normed    x = norm(W · norm(patch) + b)
shifted   x = W · norm(patch of five images) + b

The five images are the image and four copies that are shifted by a pixel: to the right, to the left, down and up.
Pixels outside the image are 0. The copies are further channels, so a patch has 5·c·p·p values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.families.vit_pytorch import EmbeddingKind, VitPytorchSpec
from gmmvit_deploy.models.layers.attention import MaskedAttention, ReAttention
from gmmvit_deploy.models.layers.blocks import PreNormBlock, layer_norm
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.layers.patches import NormedPatchEmbedding, PatchEmbedding, flat_patches
from gmmvit_deploy.models.layers.roles import with_role
from gmmvit_deploy.models.scores.attention import AttentionScores, scaled_scores
from gmmvit_deploy.models.scores.heads import HeadMixing, HeadNorm
from gmmvit_deploy.models.scores.locality import MaskedDiagonal
from gmmvit_deploy.models.scores.scales import LearnedTemperature, Scale
from gmmvit_deploy.models.scores.step import lattice_points
from gmmvit_deploy.models.specs import MEAN_OF_TOKENS

_LONGEST_WAVE = 10000.0
_SHIFTS = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0))
"""(rows, columns) by which the contents of each of the five images are moved down and to the right."""
_VIEWS = len(_SHIFTS)


def _attention(spec: VitPytorchSpec) -> MaskedAttention:
    dim, heads, head_dim, scores = spec.dim, spec.heads, spec.head_dim, _scores(spec)
    if spec.attention == "reattention":
        return ReAttention(dim=dim, heads=heads, head_dim=head_dim, scores=scores)
    projects = spec.output != "absent"
    attention = MaskedAttention(dim=dim, heads=heads, head_dim=head_dim, scores=scores, projects_output=projects)
    if spec.output == "no bias":
        attention.out = with_role(nn.Linear(heads * head_dim, dim, bias=False), "projection")
    return attention


def _scores(spec: VitPytorchSpec) -> AttentionScores:
    factor = spec.head_dim**-0.5
    if spec.attention == "plain":
        return scaled_scores(factor)
    if spec.attention == "lsa":
        return AttentionScores(
            before={
                "temperature": LearnedTemperature(torch.tensor(factor).log(), is_logarithm=True, usual=factor),
                "diagonal": MaskedDiagonal(spec.tokens),
            }
        )
    return AttentionScores(
        before={"scale": Scale(factor)},
        after={
            "mixing": HeadMixing(torch.randn(spec.heads, spec.heads)),
            "norm": HeadNorm(torch.ones(spec.heads), torch.zeros(spec.heads)),
        },
    )


class ShiftedPatchEmbedding(PatchEmbedding):
    """Shifted patch tokenization (SPT) with shifts of a single pixel."""

    view_count: ClassVar[int] = _VIEWS
    operator_roles: ClassVar[Mapping[str, Role]] = {"pad": "shape"}

    def __init__(self, patch_size: int, dim: int, *, channels: int) -> None:
        super().__init__(patch_size, dim, channels=_VIEWS * channels)
        self.patch_norm = layer_norm(_VIEWS * channels * patch_size**2)

    def forward(self, images: Float[Tensor, "batch channels side side"]) -> Float[Tensor, "batch n dim"]:
        rows, columns = images.shape[-2:]
        padded = nn.functional.pad(images, (1, 1, 1, 1))
        views = [padded[..., 1 - down : 1 - down + rows, 1 - right : 1 - right + columns] for down, right in _SHIFTS]
        patches = flat_patches(torch.cat(views, dim=1), self.patch_size)
        tokens: Tensor = self.project(self.patch_norm(patches))
        return tokens


_EMBEDDINGS: Mapping[EmbeddingKind, type[PatchEmbedding]] = {
    "linear": PatchEmbedding,
    "normed": NormedPatchEmbedding,
    "shifted": ShiftedPatchEmbedding,
}


def sinusoidal_positions(grid: int, dim: int) -> Float[Tensor, "1 n dim"]:
    """Return the positions of a square grid, computed in float32 as in vit-pytorch, also for a model in float64.

    Row r, column s, k = 0 … D/4 − 1:  [sin(s·ω_k), cos(s·ω_k), sin(r·ω_k), cos(r·ω_k)]    ω_k = 10000^(−k / (D/4 − 1))
    dim: the width D, a multiple of 4 and at least 8.
    """
    waves = 1.0 / _LONGEST_WAVE ** (torch.arange(dim // 4) / (dim // 4 - 1))
    rows, columns = (points[:, None] * waves for points in lattice_points(grid).unbind(1))
    return torch.cat([columns.sin(), columns.cos(), rows.sin(), rows.cos()], dim=1)[None]


class VitPytorch(Model):
    """A network of vit-pytorch."""

    operator_roles: ClassVar[Mapping[str, Role]] = {"add": "bias", "mean": "pooling"}

    spec: VitPytorchSpec
    position_embedding: Tensor

    def __init__(self, spec: VitPytorchSpec) -> None:
        super().__init__()
        self.spec = spec
        self.pools = spec.pool
        self.patch_embedding = _EMBEDDINGS[spec.embedding](spec.patch_size, spec.dim, channels=spec.channels)
        self.class_token = nn.Parameter(torch.randn(1, 1, spec.dim)) if spec.class_token else None
        if spec.stored_positions:
            self.position_embedding = nn.Parameter(0.02 * torch.randn(1, spec.tokens, spec.dim))
        else:  # the sizes determine the sinusoids, so the state dict omits the buffer
            self.register_buffer("position_embedding", sinusoidal_positions(spec.grid, spec.dim), persistent=False)
        self.blocks = nn.ModuleList(
            PreNormBlock(dim=spec.dim, mlp_dim=spec.mlp_dim, attention=_attention(spec)) for _ in range(spec.depth)
        )
        self.final_norm = layer_norm(spec.dim) if spec.final_norm else None
        self.head_norm = layer_norm(spec.dim) if spec.head_norm else None
        self.head = with_role(nn.Linear(spec.dim, spec.classes), "head")

    @property
    def pooling(self) -> str:
        return super().pooling if self.pools == "cls" else MEAN_OF_TOKENS

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
