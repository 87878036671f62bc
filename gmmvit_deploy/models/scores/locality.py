"""Locality self-attention (LSA): a learned temperature for each head, and no token attends to itself.

    P = softmax(t[h] · Q Kᵀ + B + D)        D = −∞ on the diagonal, 0 elsewhere

t[h] is the factor itself: no logarithm, no square root, no inverse. B is the position bias of Swin, else 0.
Source: "Vision Transformer for Small-Size Datasets" (arXiv 2112.13492) and the released code of the paper's authors,
which stores t as ``scale``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.scores.attention import AttentionScores
from gmmvit_deploy.models.scores.scales import LearnedTemperature
from gmmvit_deploy.models.scores.step import Add, Multiply, Step

_MISSING = "the diagonal not masked"
_LARGE = -987654321.0  # LSA's released code puts this number on the diagonal in its ViT


class MaskedDiagonal(Add):
    """A bias B that is ``value`` on the diagonal and 0 elsewhere.

    value: −∞, or a large negative number such as −987654321.

    The released code of LSA overwrites the diagonal of the scores with the value. Adding and overwriting give the same
    attention weights, because the weights on the diagonal are exactly 0 after softmax.
    """

    masked: Tensor

    def __init__(self, tokens: int, value: float = -math.inf) -> None:
        super().__init__()
        self.allows_minus_infinity = value == -math.inf
        # B follows from the number of tokens. B is computed again at loading, and the state dict omits B.
        self.register_buffer("masked", torch.zeros(tokens, tokens).fill_diagonal_(value), persistent=False)

    def matrix(self) -> Float[Tensor, "n n"]:
        return self.masked

    def mistakes(self) -> Iterator[tuple[str, Step | None]]:
        yield _MISSING, None


class ZeroDiagonal(Multiply):
    """A mask M = 1 − I: the score of each token with itself becomes 0.

    heads: H, for a mask (H, N, N) with a copy for each head, the form that the CPU kernel takes; None for (N, N).
    """

    role: Role = "mask"
    kept: Tensor

    def __init__(self, tokens: int, *, heads: int | None = None) -> None:
        super().__init__()
        kept = torch.ones(tokens, tokens).fill_diagonal_(0)
        copies = kept if heads is None else kept.repeat(heads, 1, 1)
        self.register_buffer("kept", copies, persistent=False)

    def matrix(self) -> Float[Tensor, "*heads n n"]:
        return self.kept

    def mistakes(self) -> Iterator[tuple[str, Step | None]]:
        yield _MISSING, None
        yield "a large negative number on the diagonal in place of 0", MaskedDiagonal(self.kept.shape[-1], _LARGE)


def initial_temperature(heads: int, head_dim: int, *, scales_query: bool = False) -> LearnedTemperature:
    """Return the temperatures with which training starts: d^(−1/2) for each of the H heads."""
    usual = head_dim**-0.5
    return LearnedTemperature(torch.full((heads,), usual), scales_query=scales_query, usual=usual)


def locality_scores(
    *, heads: int, head_dim: int, tokens: int, bias: Step | None = None, scales_query: bool = False
) -> AttentionScores:
    """Return the scores of locality self-attention.

    tokens: N, with the class token.  bias: the step that adds B.
    scales_query: True multiplies Q by the temperature in place of Q Kᵀ.
    """
    return AttentionScores(
        {
            "temperature": initial_temperature(heads, head_dim, scales_query=scales_query),
            "bias": bias,
            "diagonal": MaskedDiagonal(tokens),
        }
    )
