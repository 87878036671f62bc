"""CaiT: what surrounds its attention and does not depend on the input goes into the weights beside it."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.folding.passes import merge_scale_into
from gmmvit_deploy.models.cait import ScaledBranch, TalkingHeadsAttention
from gmmvit_deploy.scores.attention import attention_scores

__all__ = ["merge_layer_scale", "merge_scale_into_mixing"]


@torch.no_grad()
def merge_layer_scale(model: nn.Module) -> tuple[str, ...]:
    """γ ∘ (W x + b)  →  (diag(γ) W) x + γ ∘ b, in the last linear map of each branch.

    Requires: the branch ends in a linear map, as attention and mlp do.
    Ensures: no γ is left, and the merged weight is the product, bit for bit.
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


@torch.no_grad()
def merge_scale_into_mixing(model: nn.Module) -> tuple[str, ...]:
    """W_preᵀ (S · d^(−1/2))  →  (d^(−1/2) · W_pre)ᵀ S, where there is no mask between them.

    Where there is one, `merge_scale` has put the scale into it, and the mask itself cannot go into
    W_pre: it multiplies each entry of the scores, the mixing sums over heads.
    Left alone: a scale with another step between it and the mixing, such as a masked diagonal.
    Ensures: no scale stands right in front of a mixing.
    """
    changed = []
    for name, scores in attention_scores(model):
        roles = [step.role for _, step in scores.steps_before()]
        if ("scale", "mask") in pairwise(roles) and "mixing" in roles:
            raise FoldError(f"{name}: its mask stands between the scale and the mixing; merge the scale into it first")
        if merge_scale_into("mixing", name, scores):
            changed.append(name)
    return tuple(changed)
