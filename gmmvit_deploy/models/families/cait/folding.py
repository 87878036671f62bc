"""CaiT: merge the factors γ of LayerScale into weights, and drop or move the small bias that LSA adds.

For engines, `widen_heads` rewrites talking heads, which (H, H) matrices mix before and after softmax, as plain heads of
head dim H·d, so that fused GPU kernels can compute the attention. `layers.wide_heads` has the algebra. For the released
models, H·d is 256.
"""

from __future__ import annotations

import copy
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.families.cait.model import REMAINDER, ScaledBranch, TalkingHeadsAttention
from gmmvit_deploy.models.layers.attention import projected
from gmmvit_deploy.models.layers.proofs import merge_factor, random_values, require_same_output
from gmmvit_deploy.models.layers.wide_heads import LARGEST_FUSED, WideHeads, same_for_all_heads
from gmmvit_deploy.models.scores.attention import AttentionScores
from gmmvit_deploy.models.scores.step import Constant, Step

_LARGEST = 2.0**-24  # the relative rounding error of float32
_ROUNDING = 1e-6  # the constant B is stored in float32, and the sums over the heads round


@torch.no_grad()
def drop_remainder(model: nn.Module) -> tuple[str, ...]:
    """Remove the −1e-9 that LSA adds to the diagonal, or move it behind the head mixing.

    W_preᵀ ((1 − I) ∘ S − 1e-9 · I)  =  W_preᵀ ((1 − I) ∘ S) + B,    B[g] = −1e-9 · Σ_h W_pre[h, g] · I

    Adding B to the scores of head g changes no weight of softmax by more than the relative difference
    exp(2 · 1e-9 · |Σ_h W_pre[h, g]|) − 1. If this difference is below 2⁻²⁴, the rounding error of float32, for every
    head, the pass leaves B out. Otherwise B becomes a constant (H, N, N) that is added after the head mixing.
    Requires: the biases are folded.
    Ensures: no such bias precedes the head mixing; a bias B has the effect of the −1e-9 before the head mixing.
    """
    changed = []
    for name, module in model.named_modules():
        if not isinstance(module, TalkingHeadsAttention):
            continue
        scores = module.scores
        steps = dict(scores.steps_before())
        names = [name.removeprefix("before.") for name in steps]
        if REMAINDER not in names or names.index(REMAINDER) > names.index("mixing"):
            continue  # the attention has no such bias, or an earlier run moved it
        remainder, mixing = steps[f"before.{REMAINDER}"], steps["before.mixing"]
        if not remainder.is_constant:
            raise FoldError(f"{name}: the diagonal must be a constant; run fold_biases first")
        # B in float64: the diagonal of the bias, times the sum of each column of W_pre.
        bias = torch.diag_embed(remainder.matrix().double().diagonal() * mixing.matrix().double().sum(dim=0)[:, None])
        if float(torch.expm1(2 * bias.abs().max())) < _LARGEST:
            scores.put(f"before.{REMAINDER}", None)
        else:
            _move_behind_mixing(name, scores, bias, like=remainder)
        changed.append(name)
    return tuple(changed)


def _move_behind_mixing(name: str, scores: AttentionScores, bias: Float[Tensor, "heads n n"], *, like: Step) -> None:
    """Replace the bias ``like`` before the head mixing by the constant ``bias`` after the head mixing."""
    expected = _of_zero_products(scores, bias)
    scores.put(f"before.{REMAINDER}", None)  # a step that is put again becomes the last step
    scores.put(f"before.{REMAINDER}", Constant(bias.to(like.matrix().dtype), like=like))
    off = float((_of_zero_products(scores, bias) - expected).abs().max())
    if not off <= _ROUNDING * float(bias.abs().max()):
        raise FoldError(f"{name}: drop_remainder changed the scores by {off:.2e}; expected only rounding")


def _of_zero_products(scores: AttentionScores, like: Float[Tensor, "heads n n"]) -> Float[Tensor, "1 heads n n"]:
    """Return the input of softmax for Q Kᵀ = 0, in float64.  like: any tensor (H, N, N)."""
    return copy.deepcopy(scores).double().masked(torch.zeros_like(like, dtype=torch.float64)[None])


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


class WideHeadsAttention(WideHeads):
    """`TalkingHeadsAttention` rewritten without head mixing: H heads with head dim H·d each."""

    stacked_projection: ClassVar[tuple[str, int]] = ("key_value", 2)

    def __init__(self, talking: TalkingHeadsAttention) -> None:
        before = talking.scores.steps_before()
        ((_, mix_before),) = ((name, step) for name, step in before if step.operation == "mix")
        ((_, mix_after),) = talking.scores.steps_after()
        super().__init__(
            AttentionScores({name.removeprefix("before."): step for name, step in before if step is not mix_before}),
            before=mix_before.matrix(),
            after=mix_after.matrix(),
            head_dim=talking.query.out_features // talking.heads,
        )
        self.query, self.key_value, self.out = talking.query, talking.key_value, talking.out

    def forward(self, x: Float[Tensor, "batch i dim"], context: Tensor) -> Float[Tensor, "batch i dim"]:
        key, value = projected(self.key_value, context, 2)
        out: Tensor = self.out(self.attended(self.query(x), key, value))
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
    """Return True if the steps are constant factors shared by all heads, head mixing, biases, softmax, and head mixing.

    A bias after the head mixing, which `drop_remainder` can leave, may differ between the heads.
    """
    before = [step for _, step in scores.steps_before()]
    operations = [step.operation for step in before]
    if [step.operation for _, step in scores.steps_after()] != ["mix"] or operations.count("mix") != 1:
        return False
    mixing = operations.index("mix")
    factors, biases = before[:mixing], before[mixing + 1 :]
    return (
        all(step.is_constant for step in (*factors, *biases))
        and all(step.operation == "multiply" and step.role != "scale" and same_for_all_heads(step) for step in factors)
        and all(step.operation == "add" for step in biases)
    )
