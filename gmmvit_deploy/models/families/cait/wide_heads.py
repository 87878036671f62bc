"""CaiT: rewrite talking heads as plain heads of head dim H·d, so that fused GPU kernels can compute the attention.

Talking heads are heads that are mixed before and after softmax by (H, H) matrices. `layers.wide_heads` has the algebra.
For the released models, H·d is 256.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.families.cait.model import TalkingHeadsAttention
from gmmvit_deploy.models.layers.attention import projected
from gmmvit_deploy.models.layers.head_dims import LARGEST_FUSED
from gmmvit_deploy.models.layers.wide_heads import WideHeads, same_for_all_heads
from gmmvit_deploy.models.scores.attention import AttentionScores

__all__ = ["WideHeadsAttention", "widen_heads"]


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
    Requires: every step on the scores is folded, which means replaced by a constant; the scale is merged into the mask
    or into the head mixing.
    Ensures: on random tokens the new and the old attention output the same values, up to float64 rounding.
    Returns the names of the changed attentions.
    Errors: FoldError when a requirement does not hold, or when the outputs differ.
    """
    changed = []
    for name, parent in list(model.named_modules()):
        for child, attention in list(parent.named_children()):
            if not isinstance(attention, TalkingHeadsAttention) or attention.query.out_features > LARGEST_FUSED:
                continue
            if _widens(f"{name}.{child}", attention.scores):
                wide = WideHeadsAttention(attention)
                _require_equal(f"{name}.{child}", attention, wide)
                setattr(parent, child, wide)
                changed.append(f"{name}.{child}")
    return tuple(changed)


def _widens(name: str, scores: AttentionScores) -> bool:
    """Return True if the steps are factors shared by all heads, head mixing, biases, softmax, and head mixing.

    The factors are steps that multiply the scores, such as a mask. A bias after the head mixing, which
    `folding.drop_remainder` can leave, may differ between the heads.
    Errors: FoldError when a factor or a bias is not folded, or when the scale is not merged into another step.
    """
    before = [step for _, step in scores.steps_before()]
    after = [step for _, step in scores.steps_after()]
    operations = [step.operation for step in before]
    if [step.operation for step in after] != ["mix"] or operations.count("mix") != 1:
        return False
    factors, biases = before[: operations.index("mix")], before[operations.index("mix") + 1 :]
    if not all(step.is_constant for step in (*factors, *biases)):
        raise FoldError(f"{name}: run the folding passes before widen_heads, which needs constant steps on the scores")
    if not all(step.operation == "multiply" and same_for_all_heads(step) for step in factors):
        return False
    if not all(step.operation == "add" for step in biases):
        return False
    if any(step.role == "scale" for step in factors):
        raise FoldError(
            f"{name}: run merge_scale and merge_scale_into_mixing before widen_heads, which accepts no scale"
        )
    return True


def _require_equal(name: str, talking: TalkingHeadsAttention, wide: WideHeadsAttention) -> None:
    masks = [step.matrix() for _, step in wide.scores.steps()]
    tokens = masks[0].shape[-1] if masks else 3
    x = torch.randn(
        2, tokens, talking.query.in_features, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    old, new = talking.double()(x, x), wide.double()(x, x)
    talking.float()
    wide.float()
    if not torch.allclose(new, old, rtol=1e-9, atol=1e-9):
        raise FoldError(f"{name}: widen_heads changed the output of this attention")
