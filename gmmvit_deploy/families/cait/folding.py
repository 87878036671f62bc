"""CaiT: merge the factors γ of LayerScale into weights, and drop a bias that is too small for float32."""

from __future__ import annotations

import torch
from torch import nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.families.cait.model import REMAINDER, ScaledBranch, TalkingHeadsAttention

__all__ = ["drop_remainder", "merge_layer_scale"]

_LARGEST = 2.0**-24
"""The relative rounding error of float32, of which the weights of attention change by less."""


@torch.no_grad()
def drop_remainder(model: nn.Module) -> tuple[str, ...]:
    """Remove the −1e-9 that LSA adds to the diagonal: W_preᵀ ((1 − I) ∘ S − 1e-9 · I)  →  W_preᵀ ((1 − I) ∘ S).

    After head mixing, −1e-9 · Σ_h W_pre[h, g] is added to the diagonal of head g. A sum of that size changes no weight
    of softmax by more than the relative difference exp(2 · 1e-9 · |Σ_h W_pre[h, g]|) − 1.
    Requires: the biases are folded, and this relative difference is below 2⁻²⁴, the rounding error of float32.
    Ensures: no such bias remains.
    Returns the names of the changed attentions.
    Errors: FoldError when a requirement does not hold.
    """
    changed = []
    for name, module in model.named_modules():
        if not isinstance(module, TalkingHeadsAttention) or REMAINDER not in module.scores.before:
            continue
        steps = dict(module.scores.steps_before())
        remainder, mixing = steps[f"before.{REMAINDER}"], steps["before.mixing"]
        if not remainder.is_constant:
            raise FoldError(f"{name}: the diagonal must be a constant; run fold_biases first")
        mixed = remainder.matrix().abs().max().double() * mixing.matrix().double().sum(dim=0).abs().max()
        largest = float(torch.expm1(2 * mixed))
        if not largest < _LARGEST:
            raise FoldError(
                f"{name}: without the diagonal of LSA the weights of attention change by a factor of up to 1 + "
                f"{largest:.2g}; expected less than the rounding error of float32, {_LARGEST:.2g}"
            )
        module.scores.put(f"before.{REMAINDER}", None)
        changed.append(name)
    return tuple(changed)


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
