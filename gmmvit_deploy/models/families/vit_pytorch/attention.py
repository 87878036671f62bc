"""The attentions of vit-pytorch: plain, Re-attention (DeepViT), and locality self-attention (small-data ViT).

plain         A = softmax(Q Kᵀ · d^(−1/2))
lsa           A = softmax(T · Q Kᵀ + B)               T = exp(temperature), B = −∞ on the diagonal and 0 elsewhere
reattention   A = norm(Wᵀ · softmax(Q Kᵀ · d^(−1/2)))

out = A V. The matrix W mixes the heads, and norm is a LayerNorm over the heads of each pair of tokens (i, j).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.models.families.vit_pytorch.spec import VitPytorchSpec
from gmmvit_deploy.models.layers.attention import MaskedAttention, heads_of, projected
from gmmvit_deploy.models.layers.roles import with_role
from gmmvit_deploy.models.scores.attention import AttentionScores, scaled_scores
from gmmvit_deploy.models.scores.diagonals import MaskedDiagonal
from gmmvit_deploy.models.scores.heads import HeadMixing, HeadNorm
from gmmvit_deploy.models.scores.scales import LearnedTemperature, Scale
from gmmvit_deploy.precision import Role

__all__ = ["ReAttention", "attention_from_spec"]


class ReAttention(MaskedAttention):
    """`MaskedAttention` with head mixing and a norm over the heads after softmax.

    value_factor: None, or the factor f (H, 1, 1) after `folding.merge_head_norm_into_values`. The output of head h for
    each token is then Σ_j A[h, i, j] · V[h, j] + f[h] · Σ_j V[h, j].
    """

    operator_roles: ClassVar[Mapping[str, Role]] = {
        **MaskedAttention.operator_roles,
        "sum": "pooling",
        "mul": "scale",
        "add": "bias",
    }
    value_factor: Tensor | None

    def __init__(self, *, dim: int, heads: int, head_dim: int, scores: AttentionScores) -> None:
        super().__init__(dim=dim, heads=heads, head_dim=head_dim, scores=scores)
        self.register_buffer("value_factor", None)

    def forward(self, x: Float[Tensor, "*batch n dim"]) -> Float[Tensor, "*batch n dim"]:
        query, key, value = (heads_of(part, self.heads) for part in projected(self.qkv, x, 3))
        mixed = self.scores.weights(query, key) @ value
        if self.value_factor is not None:
            mixed = mixed + self.value_factor * value.sum(dim=-2, keepdim=True)
        out: Tensor = self.out(mixed.transpose(-3, -2).flatten(-2))
        return out


def attention_from_spec(spec: VitPytorchSpec) -> MaskedAttention:
    """Return the attention module of a block, with random weights."""
    scores = _scores(spec)
    if spec.attention == "reattention":
        return ReAttention(dim=spec.dim, heads=spec.heads, head_dim=spec.head_dim, scores=scores)
    attention = MaskedAttention(
        dim=spec.dim,
        heads=spec.heads,
        head_dim=spec.head_dim,
        scores=scores,
        projects_output=spec.output != "absent",
    )
    if spec.output == "no bias":
        attention.out = with_role(nn.Linear(spec.heads * spec.head_dim, spec.dim, bias=False), "projection")
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
