"""Folding passes of Re-attention.  V[h] are the values of head h, d is the head dim, and S are weights after softmax.

    out[h, i] = Σ_j norm(Wᵀ S)[h, i, j] · V[h, j]          norm: LayerNorm over the heads of each pair (i, j)

The division by the standard deviation over the heads depends on the entry (i, j), so the division stays.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.layers.attention import ReAttention
from gmmvit_deploy.models.layers.proofs import change_modules, random_values
from gmmvit_deploy.models.scores.heads import CentredHeadNorm, HeadMixing, HeadNorm
from gmmvit_deploy.models.scores.scales import Scale

_SMALLEST_WEIGHT = 2.0**-10
"""A head whose weight is smaller than this fraction of the largest weight keeps the weight in the norm: in half
precision, values multiplied by such a weight would lose digits, and a weight of 0 cannot be divided by."""


@torch.no_grad()
def centre_head_mixing(model: nn.Module) -> tuple[str, ...]:
    """Move the centring of the LayerNorm over the heads into the head mixing.

    W[h, g]  →  W[h, g] − mean_k W[h, k];     LayerNorm  →  weight · S / √(mean_h S[h]² + ε) + bias

    Every row of the new W has mean 0, so the mixed weights have mean 0 over the heads, and their variance is the mean
    of their squares.
    Requires: the head mixing directly precedes the norm.
    Ensures: no attention has a LayerNorm over the heads; each attention outputs the same values up to float64 rounding.
    """

    def centre(attention: ReAttention) -> bool:
        (mixing_name, mixing), (norm_name, norm) = attention.scores.steps_after()
        if not isinstance(norm, HeadNorm):
            return False
        weight = mixing.matrix().detach().double()
        centred = HeadMixing((weight - weight.mean(dim=1, keepdim=True)).to(mixing.matrix().dtype))
        attention.scores.put(mixing_name, centred.requires_grad_(False))
        attention.scores.put(norm_name, CentredHeadNorm(norm))
        return True

    return _changed("centre_head_mixing", model, centre)


@torch.no_grad()
def merge_head_norm_into_values(model: nn.Module) -> tuple[str, ...]:
    """Move the weight and the bias of the norm over the heads to the values.

    Σ_j (weight[h] · A[h, i, j] + bias[h]) · V[h, j]  =  Σ_j A[h, i, j] · V'[h, j] + f[h] · Σ_j V'[h, j]

    V' = weight[h] · V[h], merged into the rows of the projection of V, and f[h] = bias[h] / weight[h].
    Requires: `centre_head_mixing` has run.
    Unchanged: attentions in which the weight of a head is 0, or less than 2^(−10) of the largest weight.
    Ensures: each changed attention outputs the same values up to float64 rounding, and has no bias of the norm.
    """

    def merge(attention: ReAttention) -> bool:
        _, (norm_name, norm) = attention.scores.steps_after()
        if not isinstance(norm, CentredHeadNorm):
            raise FoldError("run centre_head_mixing before merge_head_norm_into_values")
        if norm.weight is None or norm.bias is None:
            return False
        weight, bias = norm.weight.double(), norm.bias.double()
        if not bool((weight.abs() >= _SMALLEST_WEIGHT * weight.abs().max()).all()) or not bool(weight.any()):
            return False
        qkv = _stacked(attention)
        values = qkv.weight.shape[0] // 3 * 2  # the first row of V
        rows = weight.repeat_interleave((qkv.weight.shape[0] - values) // attention.heads)
        qkv.weight[values:] = rows[:, None] * qkv.weight[values:].double()
        attention.value_factor = (bias / weight)[:, None].to(norm.weight.dtype)
        attention.scores.put(norm_name, norm.without_affine())
        return True

    return _changed("merge_head_norm_into_values", model, merge)


@torch.no_grad()
def merge_scale_into_query(model: nn.Module) -> tuple[str, ...]:
    """Merge d^(−1/2) into the rows of the projection that compute Q: (Q Kᵀ) · d^(−1/2)  →  (d^(−1/2) · Q) Kᵀ.

    Ensures: each changed attention outputs the same values up to float64 rounding; no Re-attention has a scale.
    """

    def merge(attention: ReAttention) -> bool:
        scales = [(name, step) for name, step in attention.scores.steps_before() if isinstance(step, Scale)]
        qkv = _stacked(attention)
        for name, scale in scales:
            rows = qkv.weight.shape[0] // 3
            qkv.weight[:rows] = scale.factor * qkv.weight[:rows].double()
            attention.scores.put(name, None)
        return bool(scales)

    return _changed("merge_scale_into_query", model, merge)


def _changed(what: str, model: nn.Module, change: Callable[[ReAttention], bool]) -> tuple[str, ...]:
    tokens = lambda attention: random_values(2, 5, _stacked(attention).in_features)  # noqa: E731
    return change_modules(what, model, ReAttention, change, tokens)


def _stacked(attention: ReAttention) -> nn.Linear:
    if not isinstance(attention.qkv, nn.Linear):
        raise FoldError("Q, K and V are separate projections; run this pass before separate_projections")
    return attention.qkv
