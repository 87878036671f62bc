"""One stacked projection becomes several, so that each can be quantised."""

from __future__ import annotations

import torch
from torch import nn

from gmmvit_deploy.layers.attention import SeparateProjections, stacked_projection

__all__ = ["separate_projections"]


@torch.no_grad()
def separate_projections(model: nn.Module) -> tuple[str, ...]:
    """[W_q; W_k; W_v] x, then cut  →  W_q x, W_k x, W_v x.

    Why: the builder pulls the cut through the stacked product, dequantises the weights to do so,
    and runs it in half precision (seen in tensorrt-rtx 1.7.1; `gmmvit build` reports it). Three
    products of their own it joins again, and runs in int8 or fp8.
    Ensures: every weight in its place, bit for bit.
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
