"""CaiT: merge LayerScale into the weights of the branches."""

from __future__ import annotations

import torch
from torch import nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.families.cait.model import ScaledBranch, TalkingHeadsAttention

__all__ = ["merge_layer_scale"]


@torch.no_grad()
def merge_layer_scale(model: nn.Module) -> tuple[str, ...]:
    """γ ∘ (W x + b)  →  (diag(γ) W) x + γ ∘ b, in the last linear map of each branch.

    Requires: the branch ends in a linear map, as attention and mlp do.
    Ensures: no γ remains, and the merged weight equals the product bit for bit.
    """
    changed = []
    for name, branch in model.named_modules():
        if not isinstance(branch, ScaledBranch) or branch.gamma is None:
            continue
        last = branch.inner.out if isinstance(branch.inner, TalkingHeadsAttention) else branch.inner[-1]  # type: ignore[index]
        if not isinstance(last, nn.Linear) or last.bias is None:
            raise FoldError(f"{name}: its branch does not end in a linear map with a bias")
        gamma = branch.gamma.detach().flatten()
        last.weight.copy_(gamma[:, None] * last.weight)
        last.bias.copy_(gamma * last.bias)
        branch.gamma = None
        changed.append(name)
    left = [name for name, _ in model.named_parameters() if name.endswith("gamma")]
    if left:
        raise FoldError(f"LayerScale is still applied on its own in: {', '.join(left)}")
    return tuple(changed)
