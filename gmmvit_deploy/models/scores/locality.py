"""Locality self-attention (LSA): a learned temperature for each head, and no token attends to itself.

    P = softmax(t[h] · Q Kᵀ + B + D)        D = −∞ on the diagonal, 0 elsewhere

t[h] is the factor itself: no logarithm, no square root, no inverse. B is the position bias of Swin, else 0.
Source: "Vision Transformer for Small-Size Datasets" (arXiv 2112.13492) and the released code of the paper's authors,
which stores t as ``scale``.
"""

from __future__ import annotations

import torch

from gmmvit_deploy.models.scores.attention import AttentionScores
from gmmvit_deploy.models.scores.diagonals import MaskedDiagonal
from gmmvit_deploy.models.scores.scales import LearnedTemperature
from gmmvit_deploy.models.scores.step import Step


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
