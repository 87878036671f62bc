"""Swin: its windows leave the dimension of their own, so that attention has the four that fused kernels take."""

from __future__ import annotations

import torch
from torch import nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.biases import ConstantBias
from gmmvit_deploy.models.masks import ConstantMask
from gmmvit_deploy.models.swin import WindowBlock

__all__ = ["join_windows"]


@torch.no_grad()
def join_windows(model: nn.Module) -> tuple[str, ...]:
    """Scores (B, W, H, n, n)  →  (B·W, H, n, n), or (B, W·H, n, n) where the bias differs by window.

    Requires: folded masks and biases.
    Ensures: the same products and sums in the same order; constants of shifted blocks are repeated
    for each window, index w·H + h, and nothing broadcasts over windows.
    """
    changed = []
    for name, block in model.named_modules():
        if not isinstance(block, WindowBlock) or block.joined:
            continue
        scores, bias = block.attention.scores, block.attention.scores.bias
        if not isinstance(bias, ConstantBias) or not (scores.mask is None or isinstance(scores.mask, ConstantMask)):
            raise FoldError(f"{name}: its mask and bias must be folded before its windows are joined")
        if bias.constant.dim() == 4:
            windows = bias.constant.shape[0]
            scores.bias = ConstantBias(bias.constant.flatten(0, 1))
            if scores.mask is not None:
                mask = scores.mask.matrix()  # (H, n, n), or one for all heads
                scores.mask = ConstantMask(mask.expand(block.attention.heads, *mask.shape[-2:]).repeat(windows, 1, 1))
            block.attention.windows = windows
        block.joined = True
        changed.append(name)
    return tuple(changed)
