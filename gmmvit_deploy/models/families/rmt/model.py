"""RMT: a convolution stem, stages of blocks with Manhattan attention on a grid of tokens, and a head.

block:  x = x + pos(x)                       pos: 3×3 depthwise convolution
        x = x + γ₁ · attention(norm(x))      γ₁, γ₂: LayerScale, a learned factor for each feature, where present
        x = x + γ₂ · mlp(norm(x))
mlp:    second(y + conv(y)) with y = GELU(first(x)); the release of 2023 has no convolution (conv = 0)
end:    2023: head(mean(BatchNorm(x)));  2024: head(mean(swish(BatchNorm(project(x)))))
        token_label: as 2024, plus half of the maximum over all positions of token_head(x)

A grid has the shape (B, h, w, D): B images, h × w tokens, D features. Stem and downsampling output (B, D, h, w), the
layout of convolutions, which the first operator of the next block, a convolution, reads as well.
Source: "RMT: Retentive Networks Meet Vision Transformers" (arXiv 2309.11523) and its authors' code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.models.families.rmt.attention import DecomposedAttention, ManhattanAttention, PairRotation
from gmmvit_deploy.models.families.rmt.convolutions import GridConvolution, NormedConvolution, NormedLinear
from gmmvit_deploy.models.families.rmt.spec import RMTSpec
from gmmvit_deploy.models.layers.batch_norm import BatchNorm
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.layers.roles import with_role
from gmmvit_deploy.precision import Role

__all__ = ["RMT", "LayerScale", "RMTBlock", "RMTMlp", "Stage"]

_LAYER_NORM_EPS = 1e-6
_AUXILIARY_WEIGHT = 0.5  # of the logits of the token head; the paper authors' code evaluates with this weight


class Stem(nn.Module):
    """Four 3×3 convolutions with BatchNorm, and GELU between them: images (B, c, S, S) → (B, D, ⌈S/4⌉, ⌈S/4⌉)."""

    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        half = dim // 2
        self.convolutions = nn.ModuleList(
            NormedConvolution(before, after, stride=stride, role="embedding" if index == 0 else "projection")
            for index, (before, after, stride) in enumerate(
                ((channels, half, 2), (half, half, 1), (half, dim, 2), (dim, dim, 1))
            )
        )
        self.gelu = nn.GELU()

    def forward(self, images: Float[Tensor, "batch channels side side"]) -> Float[Tensor, "batch dim h w"]:
        first, *others = self.convolutions
        x: Tensor = first(images)
        for convolution in others:
            x = convolution(self.gelu(x))
        return x


class LayerScale(nn.Module):
    """Multiply each feature by a learned factor γ.  Folding merges γ into the linear layer before it."""

    role: Role = "scale"

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(1e-6 * torch.ones(dim))

    def forward(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        return self.gamma * x


class RMTMlp(nn.Module):
    """Linear layer, GELU, in the releases since 2024 x + depthwise convolution of x, and a second linear layer."""

    def __init__(self, dim: int, hidden_dim: int, *, convolves: bool) -> None:
        super().__init__()
        self.first = with_role(nn.Linear(dim, hidden_dim), "projection")
        self.gelu = nn.GELU()
        self.convolution = GridConvolution(hidden_dim, 3, adds_input=True) if convolves else None
        self.second = with_role(nn.Linear(hidden_dim, dim), "projection")

    def forward(self, x: Float[Tensor, "batch h w dim"]) -> Float[Tensor, "batch h w dim"]:
        hidden = self.gelu(self.first(x))
        if self.convolution is not None:
            hidden = self.convolution(hidden)
        out: Tensor = self.second(hidden)
        return out


class RMTBlock(nn.Module):
    """A block of a stage, as in the formulas of this module.  stage: the number of the stage, counted from 0.

    attention_scale, mlp_scale: γ₁ and γ₂, or None in a block without LayerScale and after folding.
    """

    operator_roles: ClassVar[Mapping[str, Role]] = {"add": "residual"}

    def __init__(self, spec: RMTSpec, stage: int) -> None:
        super().__init__()
        dim, scaled = spec.dims[stage], stage + 1 in spec.layer_scale
        attention = DecomposedAttention if stage + 1 in spec.decomposed_stages else ManhattanAttention
        self.position = GridConvolution(dim, 3, adds_input=True)
        self.attention_norm = nn.LayerNorm(dim, eps=_LAYER_NORM_EPS)
        self.attention = attention(dim, spec.heads[stage], spec.grids[stage])
        self.attention_scale = LayerScale(dim) if scaled else None
        self.mlp_norm = nn.LayerNorm(dim, eps=_LAYER_NORM_EPS)
        self.mlp = RMTMlp(dim, spec.mlp_dims[stage], convolves=spec.release != "2023")
        self.mlp_scale = LayerScale(dim) if scaled else None

    def forward(self, x: Float[Tensor, "batch h w dim"], rotation: nn.Module | None) -> Float[Tensor, "batch h w dim"]:
        x = self.position(x)
        attended = self.attention(self.attention_norm(x), rotation)
        x = x + (attended if self.attention_scale is None else self.attention_scale(attended))
        out: Tensor = self.mlp(self.mlp_norm(x))
        return x + (out if self.mlp_scale is None else self.mlp_scale(out))


class Downsampling(nn.Module):
    """A 3×3 convolution of stride 2 with BatchNorm: (B, h, w, D) → (B, D', ⌈h/2⌉, ⌈w/2⌉)."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.reduction = NormedConvolution(dim, out, stride=2, role="projection")

    def forward(self, x: Float[Tensor, "batch h w dim"]) -> Float[Tensor, "batch out half_h half_w"]:
        out: Tensor = self.reduction(x.permute(0, 3, 1, 2))
        return out


class Stage(nn.Module):
    """Blocks on the same grid of tokens, then a convolution of stride 2 unless the stage is the last stage.

    forward: (B, D, h, w) → (B, D', ⌈h/2⌉, ⌈w/2⌉), or (B, h, w, D) in the last stage.
    rotation: the rotary position embedding of Q and K in all blocks; None in the release of 2023.
    """

    rotation: nn.Module | None

    def __init__(self, spec: RMTSpec, stage: int) -> None:
        super().__init__()
        blocks = [RMTBlock(spec, stage) for _ in range(spec.depths[stage])]
        head_dim, shape = spec.dims[stage] // spec.heads[stage], blocks[0].attention.token_shape()
        self.rotation = PairRotation(head_dim, shape) if spec.rotates else None
        self.blocks = nn.ModuleList(blocks)
        last = stage == len(spec.depths) - 1
        self.downsampling = None if last else Downsampling(spec.dims[stage], spec.dims[stage + 1])

    def forward(self, lattice: Float[Tensor, "batch dim h w"]) -> Tensor:
        x = lattice.permute(0, 2, 3, 1)
        for block in self.blocks:
            x = block(x, self.rotation)
        return x if self.downsampling is None else self.downsampling(x)


class Projection(nn.Module):
    """A linear layer with BatchNorm, then swish: y · σ(y).  (B, h, w, D) → (B, h, w, P)."""

    operator_roles: ClassVar[Mapping[str, Role]] = {"sigmoid": "activation", "mul": "activation"}

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.normed = NormedLinear(dim, out)

    def forward(self, x: Float[Tensor, "batch h w dim"]) -> Float[Tensor, "batch h w out"]:
        y: Tensor = self.normed(x)
        return y * torch.sigmoid(y)


class RMT(Model):
    """RMT of any release.

    projection: None in the release of 2023.
    norm: the BatchNorm before the head of the release of 2023; None in the other releases, and after folding.
    token_head: the head on every position in the release with token labels, otherwise None.
    forward: images (B, c, S, S), normalised, float32 → logits (B, C).
    """

    operator_roles: ClassVar[Mapping[str, Role]] = {
        "mean": "pooling",
        "amax": "pooling",
        "mul": "scale",
        "add": "head",
    }

    spec: RMTSpec

    def __init__(self, spec: RMTSpec) -> None:
        super().__init__()
        self.spec = spec
        width = spec.dims[-1]
        self.stem = Stem(spec.channels, spec.dims[0])
        self.stages = nn.ModuleList(Stage(spec, stage) for stage in range(len(spec.depths)))
        self.projection = Projection(width, spec.projection_dim) if spec.projection_dim else None
        self.norm: BatchNorm | None = None if spec.projection_dim else BatchNorm(width)
        self.head = with_role(nn.Linear(spec.projection_dim or width, spec.classes), "head")
        tokens = spec.release == "token_label"
        self.token_head = with_role(nn.Linear(width, spec.classes), "head") if tokens else None
        self.token_weight = _AUXILIARY_WEIGHT

    def logits_and_features(
        self, images: Float[Tensor, "batch channels side side"]
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch dim"]]:
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x)
        y = x if self.projection is None else self.projection(x)
        if self.norm is not None:
            y = self.norm(y.movedim(-1, 1)).movedim(1, -1)
        features: Tensor = y.mean(dim=(1, 2))
        logits: Tensor = self.head(features)
        if self.token_head is None:
            return logits, features
        largest: Tensor = self.token_head(x).amax(dim=(1, 2))
        return logits + (largest if self.token_weight == 1 else self.token_weight * largest), features
