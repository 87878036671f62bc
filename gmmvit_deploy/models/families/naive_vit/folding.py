"""Naive ViT: stack the linear maps of the heads for Q, K and V into a single linear layer.

This project's CPU kernels, GPU engines and quantisers expect a single linear layer.
"""

from __future__ import annotations

import torch
from torch import nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.families.naive_vit.model import HeadwiseProjection
from gmmvit_deploy.models.layers.roles import with_role

__all__ = ["stack_heads"]


@torch.no_grad()
def stack_heads(model: nn.Module) -> tuple[str, ...]:
    """Replace each `HeadwiseProjection` by a linear layer.

    The maps W_h of the heads for Q, K or V  →  a block-diagonal matrix with the blocks W_h, and zeros elsewhere.

    Ensures: in float64 the linear layer and the maps of the heads output the same values, up to rounding.
    Returns the names of the changed projections.
    Errors: FoldError when the outputs differ.
    """
    changed = []
    for name, parent in list(model.named_modules()):
        for child, projection in list(parent.named_children()):
            if isinstance(projection, HeadwiseProjection):
                setattr(parent, child, _stacked(f"{name}.{child}", projection))
                changed.append(f"{name}.{child}")
    return tuple(changed)


def _stacked(name: str, projection: HeadwiseProjection) -> nn.Linear:
    parts, heads, head_dim, _ = projection.weight.shape
    dim = heads * head_dim
    linear = nn.Linear(dim, parts * dim).requires_grad_(False)
    by_part = [torch.block_diag(*(weight.t() for weight in part)) for part in projection.weight]
    linear.weight.copy_(torch.cat(by_part))
    linear.bias.copy_(projection.bias.flatten())
    tokens = torch.randn(2, 5, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected, stacked = projection.double()(tokens), linear.double()(tokens)
    projection.float()
    if not torch.allclose(stacked, expected, rtol=1e-12, atol=1e-12):
        raise FoldError(f"{name}: the linear layer that replaces the separate maps of the heads changes the output")
    return with_role(linear.float(), "projection")
