"""Split stacked projections of Q, K and V into separate linear layers, so that each layer can be quantised."""

from __future__ import annotations

import torch
from torch import nn

from gmmvit_deploy.models.layers.attention import SeparateProjections, stacked_projection


@torch.no_grad()
def separate_projections(model: nn.Module) -> tuple[str, ...]:
    """Replace each stacked projection by a linear layer for each part.

    [W_q; W_k; W_v] x, then Split  →  W_q x, W_k x, W_v x

    With a stacked projection, the engine builder moves the Split before the matrix product, dequantises the weights,
    and runs the matrix product in half precision (measured in tensorrt-rtx 1.7.1; `gmmvit build` reports the data
    types). With separate projections, the engine builder merges the matrix products and runs the merged product in int8
    or fp8.
    Ensures: every weight is unchanged bit for bit.
    Returns the names of the changed attentions.
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
