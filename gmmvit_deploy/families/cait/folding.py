"""CaiT: merge the factors γ of LayerScale into the weights of the residual branches."""

from __future__ import annotations

import torch
from torch import nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.families.cait.model import ScaledBranch, TalkingHeadsAttention

__all__ = ["merge_layer_scale"]


@torch.no_grad()
def merge_layer_scale(model: nn.Module) -> tuple[str, ...]:
    """Merge γ into the last linear layer of each branch.

    γ ∘ (W x + b)  →  (diag(γ) W) x + γ ∘ b

    Requires: each branch ends in a linear layer with a bias.
    Ensures: no γ remains, and each merged weight equals diag(γ) W bit for bit.
    Returns the names of the changed branches.
    Errors: FoldError when the requirement does not hold, or when a γ remains.
    """
    changed = []
    for name, branch in model.named_modules():
        if not isinstance(branch, ScaledBranch) or branch.gamma is None:
            continue
        last = branch.inner.out if isinstance(branch.inner, TalkingHeadsAttention) else branch.inner[-1]  # type: ignore[index]
        if not isinstance(last, nn.Linear) or last.bias is None:
            raise FoldError(f"{name}: expected the residual branch to end in a linear layer with a bias")
        gamma = branch.gamma.detach().flatten()
        last.weight.copy_(gamma[:, None] * last.weight)
        last.bias.copy_(gamma * last.bias)
        branch.gamma = None
        changed.append(name)
    left = [name for name, _ in model.named_parameters() if name.endswith("gamma")]
    if left:
        raise FoldError(
            f"merge_layer_scale did not merge these LayerScale parameters into the weights: {', '.join(left)}"
        )
    return tuple(changed)
