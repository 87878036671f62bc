"""DeepViT: a ViT with a class token, in which blocks mix the heads of the attention weights after softmax.

x = [class token, embedded patches] + positions
block:   x = x + attention(LN(a·x)) / a;   x = x + mlp(LN(a·x)) / a
logits = head(LN(x)[class token])

attention:  A = softmax(Q Kᵀ · d^(−1/2));   A'[g] = s · BN_g(Σ_h Θ[g,h] · A[h] + θ[g]);   out = A' V

a is the scale adjustment, d the head dim, and BN_g the BatchNorm of new head g with the stored statistics. s is
d^(−1/2) with the transform scale, otherwise 1. In a block without re-attention, A' = A.
Source: "DeepViT: Towards Deeper Vision Transformer" (arXiv 2103.11886), code zhoudaquan/dvit_repo.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.families.deepvit import DeepViTSpec
from gmmvit_deploy.models.layers.attention import ReAttention
from gmmvit_deploy.models.layers.blocks import BatchNorm, PreNormBlock
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.layers.roles import with_role
from gmmvit_deploy.models.scores.attention import AttentionScores
from gmmvit_deploy.models.scores.heads import HeadBatchNorm, HeadBias, HeadMixing
from gmmvit_deploy.models.scores.scales import Scale
from gmmvit_deploy.models.scores.step import Oddity, Step

_EPS = 1e-6
"""The epsilon of every LayerNorm. The constructor of the authors' code has 1e-5 as default, every preset has 1e-6."""


class TransformScale(Scale):
    """The factor s that multiplies the mixed weights: S' = d^(−1/2) · S."""

    def mistakes(self) -> Iterator[tuple[str, Step | None]]:
        yield "the transform scale left out", None


class ReattentionMixing(HeadMixing):
    """`HeadMixing` of Re-attention.  The file stores the transposed matrix, [new head, old head]."""

    def mistakes(self) -> Iterator[tuple[str, Step | None]]:
        yield "no head mixing", None
        yield "head mixing transposed", HeadMixing(self.weight.detach().transpose(0, 1).contiguous())


def reattention_steps(spec: DeepViTSpec) -> dict[str, Step | None]:
    heads = spec.heads
    return {
        "mixing": ReattentionMixing(torch.randn(heads, heads)),
        "bias": HeadBias(torch.zeros(heads)),
        "norm": HeadBatchNorm(heads, tokens=spec.tokens),
        "scale": TransformScale(spec.head_dim**-0.5) if spec.transform_scale else None,
    }


class DeepViTBlock(PreNormBlock):
    """A pre-norm block whose branches read the tokens times a, the scale adjustment, and are divided by a."""

    operator_roles: ClassVar[Mapping[str, Role]] = {**PreNormBlock.operator_roles, "mul": "scale", "div": "scale"}

    attention: ReAttention

    def __init__(self, spec: DeepViTSpec, *, mixes: bool) -> None:
        scores = AttentionScores({"scale": Scale(spec.head_dim**-0.5)}, reattention_steps(spec) if mixes else None)
        attention = ReAttention(
            dim=spec.dim, heads=spec.heads, head_dim=spec.head_dim, scores=scores, qkv_bias=spec.qkv_bias
        )
        super().__init__(dim=spec.dim, mlp_dim=spec.mlp_dim, attention=attention)
        self.scale_adjustment = spec.scale_adjustment
        self.attention_norm, self.mlp_norm = (nn.LayerNorm(spec.dim, eps=_EPS) for _ in range(2))

    def forward(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch given dim"]:
        a = self.scale_adjustment
        if a == 1:
            return super().forward(x)
        x = x + self.attention(self.attention_norm(a * x)) / a
        if self.gives == "first":
            x = x[:, :1]
        out: Tensor = x + self.mlp(self.mlp_norm(a * x)) / a
        return out


class ConvolutionStem(nn.Module):
    """Two convolutions with BatchNorm and ReLU: 7×7 with stride 2 and padding 3, then 3×3 with padding 1.

    forward: images (B, c, S, S) → (B, channels, S/2, S/2).
    """

    operator_roles: ClassVar[Mapping[str, Role]] = {"relu": "activation"}

    def __init__(self, image_channels: int, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            [
                with_role(nn.Conv2d(image_channels, channels, 7, stride=2, padding=3, bias=False), "embedding"),
                with_role(nn.Conv2d(channels, channels, 3, padding=1, bias=False), "projection"),
            ]
        )
        self.norms = nn.ModuleList(BatchNorm(channels) for _ in range(2))

    def forward(self, images: Float[Tensor, "batch channels side side"]) -> Tensor:
        x = images
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = torch.relu(norm(convolution(x)))
        return x


class DeepViT(Model):
    """DeepViT."""

    operator_roles: ClassVar[Mapping[str, Role]] = {"add": "bias"}

    spec: DeepViTSpec

    def __init__(self, spec: DeepViTSpec) -> None:
        super().__init__()
        self.spec = spec
        self.stem = ConvolutionStem(spec.channels, spec.stem_channels) if spec.stem_channels else nn.Identity()
        side = spec.patch_size // 2 if spec.stem_channels else spec.patch_size
        self.patch_embedding = with_role(
            nn.Conv2d(spec.stem_channels or spec.channels, spec.dim, side, stride=side),
            "projection" if spec.stem_channels else "embedding",
        )
        self.class_token = nn.Parameter(torch.randn(1, 1, spec.dim))
        self.position_embedding = nn.Parameter(0.02 * torch.randn(1, spec.tokens, spec.dim))
        self.blocks = nn.ModuleList(DeepViTBlock(spec, mixes=mixes) for mixes in spec.reattention)
        self.head_norm = nn.LayerNorm(spec.dim, eps=_EPS)
        self.head = with_role(nn.Linear(spec.dim, spec.classes), "head")

    def oddities(self) -> Iterator[tuple[str, Oddity]]:
        if self.spec.scale_adjustment == 1 or any(self.spec.reattention):
            return
        what = (
            f"no block has re-attention, and the scale adjustment is {self.spec.scale_adjustment:g}: the authors' code "
            "applies a scale adjustment to such a network only if training built the network with re_atten=True; after "
            "training with re_atten=False, type --set scale_adjustment=1"
        )
        yield "blocks", Oddity(severity="warning", what=what)

    def logits_and_features(
        self, images: Float[Tensor, "batch channels side side"]
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch dim"]]:
        patches = self.patch_embedding(self.stem(images)).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(patches.shape[0], -1, -1), patches], dim=1) + self.position_embedding
        for block in self.blocks:
            x = block(x)
        features: Tensor = self.head_norm(x)[:, 0]
        return self.head(features), features
