"""Usual mistakes in a CaiT.  The steps on the attention scores have mistakes of their own."""

from __future__ import annotations

from collections.abc import Callable

from gmmvit_deploy.models.families.cait.model import CaiT, ScaledBranch
from gmmvit_deploy.models.families.family import Mistake
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.scores.attention import attention_scores
from gmmvit_deploy.models.scores.heads import HeadMixing
from gmmvit_deploy.models.scores.locality import MaskedDiagonal, ZeroDiagonal


def _other_class_blocks(model: Model) -> bool:
    """Exchange the class blocks of vit-pytorch, whose class token attends to itself, with the authors' class blocks."""
    if not isinstance(model, CaiT):
        return False
    for module in model.class_blocks.modules():
        if isinstance(module, ScaledBranch):
            module.attends_to_itself = not module.attends_to_itself
    return True


def _mixing_transposed(*sides: str) -> Callable[[Model], bool]:
    """Return a function that transposes the head mixings.  sides: ``before`` softmax, ``after`` softmax, or both."""

    def make(model: Model) -> bool:
        mixings = [
            step
            for _, scores in attention_scores(model)
            for name, step in scores.steps()
            if isinstance(step, HeadMixing) and name.partition(".")[0] in sides
        ]
        for mixing in mixings:
            mixing.transpose()
        return bool(mixings)

    return make


def _minus_infinity_after_mixing(model: Model) -> bool:
    """Mask the diagonal where LSA sets the scores of the tokens with themselves to −1e-9."""
    changed = False
    for _, scores in attention_scores(model):
        for _, step in scores.steps_before():
            if isinstance(step, ZeroDiagonal):
                scores.before["masked"] = MaskedDiagonal(step.matrix().shape[-1])
                changed = True
    return changed


MISTAKES: tuple[Mistake, ...] = (
    ("the class token added to the keys of the class blocks, or left out of the keys", _other_class_blocks),
    ("head mixing transposed", _mixing_transposed("before", "after")),
    ("head mixing before softmax transposed", _mixing_transposed("before")),
    ("head mixing after softmax transposed", _mixing_transposed("after")),
    ("the diagonal masked by −∞ in place of scores of −1e-9", _minus_infinity_after_mixing),
)
