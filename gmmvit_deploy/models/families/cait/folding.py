"""CaiT: merge the factors γ of LayerScale into weights, drop the small bias that LSA adds, and widen the heads.

For engines, `widen_heads` rewrites talking heads, which (H, H) matrices mix before and after softmax, as plain heads of
head dim H·d (wide heads), so that fused GPU kernels can compute the attention. In the formulas, Q_k, K_k and V_k belong
to head k, A_h is softmax of the mixed scores of head h, and g is a head of the output:

    Σ_k W_pre[k,h] · M ∘ (Q_k K_kᵀ)  =  M ∘ (Q̃_h K̃ᵀ)    Q̃_h = [W_pre[0,h]·Q_0, …],  K̃ = [K_0, K_1, …]
    Σ_h W_post[h,g] · A_h V_g        =  (Σ_h A_h Ṽ_h)_g   Ṽ_h = [W_post[h,0]·V_0, …]

The algebra is exact; only the order of the sums changes. The matrix products Q̃ K̃ᵀ and A Ṽ take H times the work of the
original products, and the rewrite helps only if fused kernels support the head dim H·d, which is 256 for the released
models. All heads must share the mask M: a mask M_k of each head would be inside the sum over k. Masks of matrix rank R
could be merged into Q and K, but the head dim would be R·H·d, too large for fused kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.families.cait.model import REMAINDER, ScaledBranch, TalkingHeadsAttention
from gmmvit_deploy.models.layers.attention import LARGEST_FUSED, projected
from gmmvit_deploy.models.layers.proofs import merge_factor, random_values, require_same_output
from gmmvit_deploy.models.scores.attention import AttentionScores
from gmmvit_deploy.models.scores.step import Step

_LARGEST = 2.0**-24  # the relative rounding error of float32


@torch.no_grad()
def drop_remainder(model: nn.Module) -> tuple[str, ...]:
    """Remove the −1e-9 that LSA adds to the diagonal, where it is no more than a rounding error.

    W_preᵀ ((1 − I) ∘ S − 1e-9 · I)  =  W_preᵀ ((1 − I) ∘ S) + B,    B[g] = −1e-9 · Σ_h W_pre[h, g] · I

    Adding B to the scores of head g changes no weight of softmax by more than the relative difference
    exp(2 · 1e-9 · |Σ_h W_pre[h, g]|) − 1. If this difference is below 2⁻²⁴, the rounding error of float32, for every
    head, the pass removes the bias. Otherwise the bias stays, though float16 rounds −1e-9 to 0.
    Requires: the biases are folded.
    """
    changed = []
    for name, module in model.named_modules():
        if not isinstance(module, TalkingHeadsAttention):
            continue
        steps = dict(module.scores.steps_before())
        remainder = steps.get(f"before.{REMAINDER}")
        if remainder is None:
            continue
        if not remainder.is_constant:
            raise FoldError(f"{name}: the diagonal must be a constant; run fold_biases first")
        sums = steps["before.mixing"].matrix().double().sum(dim=0).abs()
        largest = remainder.matrix().double().abs().max() * sums.max()
        if float(torch.expm1(2 * largest)) < _LARGEST:
            module.scores.put(f"before.{REMAINDER}", None)
            changed.append(name)
    return tuple(changed)


@torch.no_grad()
def merge_layer_scale(model: nn.Module) -> tuple[str, ...]:
    """Merge γ into the last linear layer of each branch: γ ∘ (W x + b)  →  (diag(γ) W) x + γ ∘ b, bit for bit."""
    changed = []
    for name, branch in model.named_modules():
        if not isinstance(branch, ScaledBranch) or branch.gamma is None:
            continue
        last = branch.inner.out if isinstance(branch.inner, TalkingHeadsAttention) else branch.inner[-1]  # type: ignore[index]
        if merge_factor(last, branch.gamma.flatten()):
            branch.gamma = None
            changed.append(name)
    return tuple(changed)


class WideHeadsAttention(nn.Module):
    """`TalkingHeadsAttention` rewritten without head mixing: H heads with head dim H·d each.

    queries, keys, values: the factors (H, 1, H·d) by which each head multiplies the projections; those of ``keys`` are
    1, because fused kernels require a separate K for each head.
    """

    stacked_projection: ClassVar[tuple[str, int]] = ("key_value", 2)
    operator_roles: ClassVar[Mapping[str, Role]] = {
        "softmax": "softmax",
        "matmul": "product",
        "mul": "mixing",
        "sum": "mixing",
    }
    queries: Tensor
    keys: Tensor
    values: Tensor

    def __init__(self, talking: TalkingHeadsAttention) -> None:
        super().__init__()
        *shared, (_, mix_before) = talking.scores.steps_before()
        ((_, mix_after),) = talking.scores.steps_after()
        self.scores = AttentionScores({name.removeprefix("before."): step for name, step in shared})
        self.query, self.key_value, self.out = talking.query, talking.key_value, talking.out
        head_dim = talking.query.out_features // talking.heads
        spread = [
            mixing.detach().repeat_interleave(head_dim, dim=1).unsqueeze(1)
            for mixing in (mix_before.matrix().transpose(0, 1), mix_after.matrix())
        ]
        self.register_buffer("queries", spread[0].clone())
        self.register_buffer("keys", torch.ones_like(spread[0]))
        self.register_buffer("values", spread[1].clone())

    def forward(self, x: Float[Tensor, "batch i dim"], context: Tensor) -> Float[Tensor, "batch i dim"]:
        key, value = projected(self.key_value, context, 2)
        query, key, value = (part.unsqueeze(1) for part in (self.query(x), key, value))
        weights = self.scores.weights(query * self.queries, key * self.keys)
        out: Tensor = self.out((weights @ (value * self.values)).sum(dim=1))
        return out


@torch.no_grad()
def widen_heads(model: nn.Module) -> tuple[str, ...]:
    """Rewrite talking heads as heads of head dim H·d (wide heads).

    Unchanged: attentions whose heads have different masks, and attentions with a head dim H·d above `LARGEST_FUSED`.
    Requires: every step on the scores is folded; the scale is merged into the mask or into the head mixing.
    Ensures: on random tokens the new and the old attention output the same values, up to float64 rounding.
    """
    changed = []
    for name, attention in list(model.named_modules()):
        if not isinstance(attention, TalkingHeadsAttention) or attention.query.out_features > LARGEST_FUSED:
            continue
        if _widens(attention.scores):
            wide = WideHeadsAttention(attention)
            masks = [step.matrix() for _, step in wide.scores.steps()]
            x = random_values(2, masks[0].shape[-1] if masks else 3, attention.query.in_features)
            require_same_output(f"{name}: widen_heads", attention, wide, x, x)
            model.set_submodule(name, wide)
            changed.append(name)
    return tuple(changed)


def _widens(scores: AttentionScores) -> bool:
    """Return True if the steps are constant factors shared by all heads, head mixing, softmax, and head mixing."""
    *factors, mixing = (step for _, step in scores.steps_before())
    return (
        [step.operation for step in (mixing, *(step for _, step in scores.steps_after()))] == ["mix", "mix"]
        and all(step.is_constant and step.operation == "multiply" and step.role != "scale" for step in factors)
        and all(_same_for_all_heads(step) for step in factors)
    )


def _same_for_all_heads(step: Step) -> bool:
    constant = step.matrix()
    return constant.dim() < 3 or bool((constant == constant[:1]).all())
