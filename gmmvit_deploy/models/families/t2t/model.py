"""T2T-ViT: single-head token transformers on overlapping patches, followed by a ViT.

    tokens = unfold(image);  for each token transformer: tokens = unfold(grid(transformer(tokens)))
    token transformer:  q, k, v = qkv(norm1(x));  scores = q kᵀ · (input width)^(−1/2)
                        x' = proj(attention) + v;  x'' = x' + mlp(norm2(x'))       no skip connection from x
    ViT block:          y = norm1(x);  x = x + (proj(attention(y)) + y);  x = x + mlp(norm2(x))
    logits = head(mean over tokens of norm(x))

unfold collects 3×3 neighbourhoods with stride 2 and padding 1, in the order (channel, row, column). grid arranges the
tokens as a square lattice.

The released code of SPT and LSA has another T2T: a class token stands before the tokens of the ViT, and

    logits = head(norm(x)[class token])

SPT: the first unfold reads the image and four copies, shifted by a pixel (`layers.patches`). LSA: the steps of
`scores.locality` in all attentions. In ViT blocks with a single head, V is added in place of y.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.families.t2t import T2TSpec
from gmmvit_deploy.models.layers.attention import MaskedAttention, heads_of, projected
from gmmvit_deploy.models.layers.blocks import Mlp, PreNormBlock, layer_norm
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.layers.patches import ShiftedViews, Unfold
from gmmvit_deploy.models.layers.positions import sinusoidal_positions
from gmmvit_deploy.models.layers.roles import with_role
from gmmvit_deploy.models.scores.attention import AttentionScores, scaled_scores
from gmmvit_deploy.models.scores.locality import locality_scores
from gmmvit_deploy.models.scores.masks import mask_from_spec
from gmmvit_deploy.models.specs import MEAN_OF_TOKENS

_SIDE = 3
_PATCH = _SIDE**2


class TokenTransformer(nn.Module):
    """Single-head attention from input width ``width`` to output width ``dim``, then an mlp.

    V is added to the output of the attention in place of a skip connection from the input.
    """

    operator_roles: ClassVar[Mapping[str, Role]] = {"softmax": "softmax", "matmul": "product", "add": "residual"}

    qkv: nn.Module
    stacked_projection: ClassVar[tuple[str, int]] = ("qkv", 3)

    def __init__(self, *, width: int, dim: int, mlp_dim: int, scores: AttentionScores) -> None:
        super().__init__()
        self.attention_norm = layer_norm(width)
        self.qkv = with_role(nn.Linear(width, 3 * dim, bias=False), "projection")
        self.scores = scores
        self.out = with_role(nn.Linear(dim, dim), "projection")
        self.mlp_norm = layer_norm(dim)
        self.mlp = Mlp(dim, mlp_dim)

    def forward(self, x: Float[Tensor, "batch n width"]) -> Float[Tensor, "batch n dim"]:
        parts = projected(self.qkv, self.attention_norm(x), 3)
        query, key, value = (heads_of(part, 1) for part in parts)
        weights = self.scores.weights(query, key)
        x = self.out((weights @ value).transpose(-3, -2).flatten(-2)) + parts[2]
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class T2TBlock(PreNormBlock):
    """A pre-norm block that also adds the normed input to the output of the attention.

    adds_value: True if V is added in place of the normed input.
    """

    attention: MaskedAttention

    def __init__(self, spec: T2TSpec) -> None:
        attention = MaskedAttention(dim=spec.dim, heads=spec.heads, head_dim=spec.head_dim, scores=_block_scores(spec))
        super().__init__(dim=spec.dim, mlp_dim=spec.mlp_dim, attention=attention)
        self.adds_value = spec.class_token and spec.heads == 1

    def forward(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch given dim"]:
        normed = self.attention_norm(x)
        beside = projected(self.attention.qkv, normed, 3)[2] if self.adds_value else normed
        x = x + (self.attention(normed) + beside)
        if self.gives == "first":
            x = x[:, :1]
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class T2T(Model):
    """Tokens-to-token vision transformer, plain or masked."""

    operator_roles: ClassVar[Mapping[str, Role]] = {"add": "bias", "mean": "pooling"}
    unfolded_patches: ClassVar[tuple[str, int]] = ("token_transformers.0.qkv", _SIDE)

    position_embedding: Tensor
    unused: nn.ParameterDict | None

    spec: T2TSpec

    def __init__(self, spec: T2TSpec) -> None:
        super().__init__()
        self.spec = spec
        channels = self.unfolded_channels
        self.views = ShiftedViews(1) if spec.spt else None
        self.unfolds = nn.ModuleList(Unfold(_SIDE, stride=2, padding=1) for _ in channels)
        self.token_transformers = nn.ModuleList(
            TokenTransformer(
                width=_PATCH * width,
                dim=spec.token_dim,
                mlp_dim=spec.token_mlp_dim,
                scores=_token_scores(spec, width=_PATCH * width, grid=grid),
            )
            for width, grid in zip(channels[:-1], spec.grids[:-1], strict=True)
        )
        self.project = with_role(nn.Linear(_PATCH * spec.token_dim, spec.dim), "projection")
        self.register_buffer("position_embedding", sinusoidal_positions(spec.tokens, spec.dim))
        self.class_token = nn.Parameter(torch.randn(1, 1, spec.dim)) if spec.class_token else None
        self.blocks = nn.ModuleList(T2TBlock(spec) for _ in range(spec.depth))
        self.norm = layer_norm(spec.dim)
        self.head = with_role(nn.Linear(spec.dim, spec.classes), "head")
        # The released model stores these parameters but never reads them.
        self.unused = nn.ParameterDict(
            {
                **({} if spec.class_token else {"class_token": torch.zeros(1, 1, spec.dim)}),
                "token_norm_weight": torch.ones(_PATCH * spec.token_dim),
                "token_norm_bias": torch.zeros(_PATCH * spec.token_dim),
            }
        )

    @property
    def unfolded_channels(self) -> tuple[int, ...]:
        """The number of channels of the lattice that each entry of ``unfolds`` reads."""
        return (self.spec.views, *[self.spec.token_dim] * self.spec.token_layers)

    @property
    def pooling(self) -> str:
        return MEAN_OF_TOKENS if self.class_token is None else super().pooling

    def logits_and_features(
        self, images: Float[Tensor, "batch channels side side"]
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch dim"]]:
        x = self.unfolds[0](images if self.views is None else self.views(images))
        for step, transformer in enumerate(self.token_transformers):
            x = transformer(x)
            grid = self.spec.grids[step]
            x = self.unfolds[step + 1](x.transpose(1, 2).reshape(-1, self.spec.token_dim, grid, grid))
        x = self.project(x)
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = x + self.position_embedding
        for block in self.blocks:
            x = block(x)
        features: Tensor = self.norm(x).mean(dim=1) if self.class_token is None else self.norm(x[:, 0])
        return self.head(features), features


def _token_scores(spec: T2TSpec, *, width: int, grid: int) -> AttentionScores:
    """Return the scores of a token transformer.  The released codes scale by the input width, not by the head dim."""
    if spec.lsa:
        return locality_scores(heads=1, head_dim=width, tokens=grid**2)
    return scaled_scores(width**-0.5, mask=mask_from_spec(spec.mask, heads=1, grid=grid), scales_query=True)


def _block_scores(spec: T2TSpec) -> AttentionScores:
    if spec.lsa:
        return locality_scores(heads=spec.heads, head_dim=spec.head_dim, tokens=spec.tokens)
    return scaled_scores(spec.head_dim**-0.5, mask=mask_from_spec(spec.mask, heads=spec.heads, grid=spec.grids[-1]))


def drop_unused(model: nn.Module) -> tuple[str, ...]:
    """Remove the norm, and in the code without SPT and LSA the class token, that the network stores but never reads."""
    if not isinstance(model, T2T) or model.unused is None:
        return ()
    names = tuple(f"unused.{name}" for name in model.unused)
    model.unused = None
    return names
