"""Swin: remove the dimension of the windows, so that attention has the four dimensions that fused kernels require."""

from __future__ import annotations

import torch
from torch import nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.families.swin.model import WindowBlock

__all__ = ["join_windows"]


@torch.no_grad()
def join_windows(model: nn.Module) -> tuple[str, ...]:
    """Move the dimension of the W windows into the dimension of the batch or of the H heads.

    Scores (B, W, H, n, n)  →  (B·W, H, n, n), or (B, W·H, n, n) if a step on the scores differs between windows.

    Requires: every step on the scores is folded, which means replaced by a constant.
    Ensures: the model computes the same products and sums in the same order. If windows become heads, each constant is
    repeated for each window, so that no constant is broadcast over windows; head h of window w gets the index w·H + h.
    Returns the names of the changed blocks.
    Errors: FoldError when a step is not folded yet.
    """
    changed = []
    for name, block in model.named_modules():
        if not isinstance(block, WindowBlock) or block.joined:
            continue
        scores = block.attention.scores
        steps = list(scores.steps())
        if not all(step.is_constant for _, step in steps):
            raise FoldError(
                f"{name}: run fold_masks and fold_biases before join_windows, which needs constant masks and biases"
            )
        by_window = [matrix.shape[0] for _, step in steps if (matrix := step.matrix()).dim() == 4]
        if by_window:
            for step_name, step in steps:
                scores.put(step_name, step.for_windows(by_window[0], block.attention.heads))
            block.attention.windows = by_window[0]
        block.joined = True
        changed.append(name)
    return tuple(changed)
