"""Passes that make a folded model fit the fused attention kernels of GPU engines: padded heads, split projections."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.layers.attention import (
    LARGEST_FUSED,
    SeparateProjections,
    masked_attentions,
    stacked_projection,
)
from gmmvit_deploy.models.layers.roles import with_role_of


def padded_head_dim(head_dim: int) -> int:
    """Round a head dim up to a head dim for which fused kernels need no copies: a multiple of 8, and at least 16.

    Measured in tensorrt-rtx 1.7.1 (benchmarks/engines.py): head dims 6 and 8 do not fuse. Head dims 9, 12, 20
    and 21 fuse, but copies before the kernel pad the heads, and copies after the kernel cut the padding off. Head dims
    16, 24, 32 and 48 fuse without copies. Head dims above `LARGEST_FUSED` do not fuse and are returned unchanged.
    """
    return head_dim if head_dim > LARGEST_FUSED else max(16, -(-head_dim // 8) * 8)


@torch.no_grad()
def pad_heads(model: nn.Module) -> tuple[str, ...]:
    """Pad the heads of each attention with zeros: head dim d  →  `padded_head_dim(d)`.

    The pass adds zero rows to the Q, K and V projections and zero columns to the output projection. The result is
    exact, because all additional summands are 0. The scale stays d^(−1/2).
    Unchanged: attentions without an output projection, which would have to cut the padding off.
    Errors: FoldError when Q, K and V are already separate projections, or when a nonzero weight got lost.
    """
    changed = []
    for name, attention in masked_attentions(model):
        if not isinstance(attention.out, nn.Linear):
            continue
        if not isinstance(attention.qkv, nn.Linear):
            raise FoldError(f"{name}: Q, K and V are separate projections; run pad_heads before separate_projections")
        heads = attention.heads
        head_dim = attention.out.in_features // heads
        padded_dim = padded_head_dim(head_dim)
        if padded_dim == head_dim:
            continue
        qkv = _with_rows(attention.qkv, groups=3 * heads, padded_dim=padded_dim)
        bias = attention.out.bias
        out = nn.Linear(heads * padded_dim, attention.out.out_features, bias=bias is not None)
        out = with_role_of(attention.out, out)
        out.weight.copy_(_pad(attention.out.weight.t(), groups=heads, padded_dim=padded_dim).t())
        if bias is not None:
            out.bias.copy_(bias)
        if out.weight.count_nonzero() != attention.out.weight.count_nonzero():
            raise FoldError(f"{name}: padding the heads changed the nonzero weights of the output projection")
        attention.qkv, attention.out = qkv.requires_grad_(False), out.requires_grad_(False)
        changed.append(name)
    return tuple(changed)


def _with_rows(linear: nn.Linear, *, groups: int, padded_dim: int) -> nn.Linear:
    padded = with_role_of(linear, nn.Linear(linear.in_features, groups * padded_dim, bias=linear.bias is not None))
    padded.weight.copy_(_pad(linear.weight, groups=groups, padded_dim=padded_dim))
    if linear.bias is not None:
        padded.bias.copy_(_pad(linear.bias[:, None], groups=groups, padded_dim=padded_dim)[:, 0])
    return padded


def _pad(rows: Tensor, *, groups: int, padded_dim: int) -> Tensor:
    """Append zero rows to each group of rows: (groups·d, c)  →  (groups·padded_dim, c)."""
    grouped = rows.unflatten(0, (groups, -1))
    return nn.functional.pad(grouped, (0, 0, 0, padded_dim - grouped.shape[1])).flatten(0, 1)


@torch.no_grad()
def separate_projections(model: nn.Module) -> tuple[str, ...]:
    """Split each stacked projection into a linear layer for each part: [W_q; W_k; W_v] x → W_q x, W_k x, W_v x.

    With a stacked projection, the engine builder moves the Split before the matrix product, dequantises the weights,
    and runs the matrix product in half precision (measured in tensorrt-rtx 1.7.1). With separate projections, it merges
    the matrix products and runs the merged product in int8 or fp8.
    Ensures: every weight is unchanged bit for bit.
    """
    changed = []
    for name, module in model.named_modules():
        declared = stacked_projection(module)
        if declared is None:
            continue
        attribute, parts = declared
        stacked = getattr(module, attribute)
        if isinstance(stacked, nn.Linear):
            setattr(module, attribute, SeparateProjections(stacked, parts))
            changed.append(name)
    return tuple(changed)
