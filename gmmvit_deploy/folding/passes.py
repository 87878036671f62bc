"""Folding passes on attention scores: what does not depend on the input becomes a constant.

A pass is a function ``(model) -> names of what it changed``. It states what it requires, what it
does and what it ensures, and proves the last before it returns. Run again, it changes nothing.
Each walks over the steps of every attention; what a step computes, only the step knows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.layers.model import Model
from gmmvit_deploy.precision import Role
from gmmvit_deploy.scores.attention import AttentionScores, attention_scores
from gmmvit_deploy.scores.step import Step

__all__ = [
    "FoldingPass",
    "fold_biases",
    "fold_masks",
    "fold_scales",
    "merge_scale",
    "merge_scale_into",
    "merge_scale_into_mixing",
    "require_constant_steps",
]

FoldingPass = Callable[[Model], tuple[str, ...]]

_WORDS: dict[Role, str] = {"mask": "mask", "score_bias": "bias", "scale": "scale"}


@torch.no_grad()
def fold_scales(model: nn.Module) -> tuple[str, ...]:
    """T = temperature, or exp(temperature)  →  the same t, stored.  A plain number is left as it is.

    Requires and ensures: as `fold_masks`.
    """
    return _fold_role(model, "scale")


@torch.no_grad()
def fold_masks(model: nn.Module) -> tuple[str, ...]:
    """M = Σ_k α_k · base ** (1/(σ_k²+ε)), or E, or the closed form, padded or not  →  the same M, stored.

    Requires: evaluation mode; float32 (in half precision the base flushes to zero before it is
    raised to its power); a finite matrix.
    Ensures: every mask is a constant, bit for bit what the trained module multiplies by; no
    parameter of a mask is left.
    """
    return _fold_role(model, "mask")


@torch.no_grad()
def fold_biases(model: nn.Module) -> tuple[str, ...]:
    """B = table[index] + shift mask  →  the same B, stored: nothing is gathered at run time.

    Requires and ensures: as `fold_masks`. −∞ is allowed where a step has it on purpose.
    """
    return _fold_role(model, "score_bias")


@torch.no_grad()
def merge_scale(model: nn.Module) -> tuple[str, ...]:
    """M ∘ (S · d^(−1/2))  →  (M · d^(−1/2)) ∘ S.

    Requires: folded masks. A plain attention keeps its scalar: it has no constant to merge it into.
    Left alone: a scale with another step between it and the mask.
    Ensures: no scale stands right in front of a mask: a masked attention multiplies its raw scores
    Q Kᵀ once, by one constant.
    """
    changed = []
    for name, scores in attention_scores(model):
        if merge_scale_into("mask", name, scores):
            changed.append(name)
    left = [name for name, scores in attention_scores(model) if _scale_before("mask", scores)]
    if left:
        raise FoldError(f"the scale is still applied on its own in: {', '.join(left)}")
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


def merge_scale_into(role: Role, name: str, scores: AttentionScores) -> bool:
    """Merge the scales of one attention into the constant of ``role`` right behind them; True if it had any.

    name: of the attention.  Errors: FoldError when the scale or that constant is not folded yet.
    """
    merged = False
    while pair := _scale_before(role, scores):
        (scale_name, scale), (next_name, following) = pair
        if not scale.is_constant or not following.is_constant:
            what = _WORDS.get(role, role)
            raise FoldError(f"{name}: its {what} is not folded yet, so its scale cannot be merged into it")
        scores.put(next_name, following.after_factor(scale.matrix()))
        scores.put(scale_name, None)
        merged = True
    return merged


def _scale_before(role: Role, scores: AttentionScores) -> tuple[tuple[str, Step], tuple[str, Step]] | None:
    """A scale, and the step of ``role`` right behind it; None where there is no such pair."""
    for first, second in pairwise(scores.steps_before()):
        if first[1].role == "scale" and second[1].role == role:
            return first, second
    return None


def require_constant_steps(model: nn.Module) -> None:
    """Errors: FoldError when a step of any role still computes its matrix."""
    left = [
        f"{name}.scores.{step_name} ({step.role})"
        for name, scores in attention_scores(model)
        for step_name, step in scores.steps()
        if not step.is_constant
    ]
    if left:
        raise FoldError(f"no folding pass made a constant of: {', '.join(left)}")


def _fold_role(model: nn.Module, role: Role) -> tuple[str, ...]:
    """Replace every step of ``role`` by the constant that its ``matrix()`` gives; prove it."""
    changed = []
    for name, scores in attention_scores(model):
        trained = [
            (step_name, step) for step_name, step in scores.steps() if step.role == role and not step.is_constant
        ]
        for step_name, step in trained:
            _require_foldable(name, step, training=model.training)
            folded = step.folded()
            if not folded.matrix().equal(step.matrix()):
                raise FoldError(f"{name}: the folded {_WORDS[role]} is not the trained one, bit for bit")
            scores.put(step_name, folded)
        if trained:
            changed.append(name)
    left = [
        name
        for name, scores in attention_scores(model)
        if any(
            step.role == role and (not step.is_constant or any(True for _ in step.parameters()))
            for _, step in scores.steps()
        )
    ]
    if left:
        raise FoldError(f"not folded: {', '.join(left)}")
    return tuple(changed)


def _require_foldable(name: str, step: Step, *, training: bool) -> None:
    what = _WORDS[step.role]
    if training:
        raise FoldError("the model is in training mode; folding is for inference", hint="call model.eval()")
    state = [tensor for tensor in (*step.parameters(), *step.buffers()) if tensor.is_floating_point()]
    if any(tensor.dtype != torch.float32 for tensor in state):
        raise FoldError(f"{name}: its {what} is not float32; fold first, cast second")
    matrix = step.matrix()
    sound = matrix.isfinite() | (matrix.isneginf() if step.allows_minus_infinity else False)
    if not bool(sound.all()):
        raise FoldError(f"{name}: its {what} has NaN or infinite entries")
