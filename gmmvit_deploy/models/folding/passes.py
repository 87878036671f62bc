"""Folding passes on attention scores: replace matrices that do not depend on the input by constants.

A pass is a function ``(model) -> names of the changed attentions``. It raises FoldError when a check of its end
state fails; the order of the passes ensures what a pass requires of earlier passes. A second run of a pass changes
nothing. In the formulas, S are the attention scores and d is the head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.layers.attention import query_rows
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.scores.attention import AttentionScores, attention_scores
from gmmvit_deploy.models.scores.step import Constant, Step

FoldingPass = Callable[[Model], tuple[str, ...]]
_Pair = tuple[tuple[str, Step], tuple[str, Step]]  # (name of the step, step), twice

_FOLDABLE = (torch.float32, torch.float64)
_WORDS: dict[Role, str] = {"mask": "mask", "score_bias": "bias", "scale": "scale"}


@torch.no_grad()
def fold_scales(model: nn.Module) -> tuple[str, ...]:
    """Replace each trained scale by a constant: T = temperature, or T = exp(temperature)  →  the same T, stored.

    Requirements and end state: as for `fold_masks`.
    """
    return _fold_role(model, "scale")


@torch.no_grad()
def fold_masks(model: nn.Module) -> tuple[str, ...]:
    """Replace each trained mask M, which multiplies the scores element by element, by a constant.

    M = Σ_k α_k · base ** (1/(σ_k²+ε)), or the closed form with token distances, or a trained matrix
      →  the same M, stored as a constant

    Requires: evaluation mode; a finite matrix; float32 or float64 tensors, because in half precision small entries of
    the base become zero before the power is computed.
    Ensures: every mask is a constant that equals the matrix of the trained step bit for bit; no mask has parameters.
    """
    return _fold_role(model, "mask")


@torch.no_grad()
def fold_biases(model: nn.Module) -> tuple[str, ...]:
    """Replace each bias by a constant: B = table[index] + shift mask  →  the same B, stored.

    Requirements and end state: as for `fold_masks`, but a bias may have entries −∞ if the step allows them.
    """
    return _fold_role(model, "score_bias")


@torch.no_grad()
def merge_biases(model: nn.Module) -> tuple[str, ...]:
    """Merge each bias into the bias directly before it: (S + B) + D  →  S + (B + D).

    For example, B is the position bias and the shift mask of Swin, and D masks the diagonal.
    Requires: folded biases.
    Ensures: no bias directly follows a bias, and no row of a bias is −∞ in every entry, which would make the softmax of
    this row NaN.
    """
    changed = []
    for name, scores in attention_scores(model):
        while pair := _adjacent(scores, "score_bias", "score_bias"):
            (first_name, first), (second_name, second) = pair
            if not (first.is_constant and second.is_constant):
                raise FoldError(f"{name}: the biases must be constants before a merge; run fold_biases first")
            merged = Constant(first.matrix() + second.matrix(), like=first)
            merged.allows_minus_infinity = first.allows_minus_infinity or second.allows_minus_infinity
            scores.put(first_name, merged)
            scores.put(second_name, None)
            changed.append(name)
        for step_name, step in scores.steps_before():
            if step.role == "score_bias" and bool(step.matrix().isneginf().all(dim=-1).any()):
                raise FoldError(f"{name}: a row of the bias {step_name} is −∞ in every entry; the softmax would be NaN")
    return tuple(dict.fromkeys(changed))


@torch.no_grad()
def merge_scale(model: nn.Module) -> tuple[str, ...]:
    """Merge each scale into the mask directly after the scale: M ∘ (S · d^(−1/2))  →  (M · d^(−1/2)) ∘ S.

    Requires: scales and masks are folded.
    Unchanged: the scale of an attention without a mask, and a scale that is separated from the mask by another step.
    Ensures: no scale directly precedes a mask.
    """
    return tuple(name for name, scores in attention_scores(model) if merge_scale_into("mask", name, scores))


@torch.no_grad()
def merge_scale_into_mixing(model: nn.Module) -> tuple[str, ...]:
    """Merge each scale into the head mixing directly after the scale: W_preᵀ (S · d^(−1/2))  →  (d^(−1/2) · W_pre)ᵀ S.

    W_pre: the (heads, heads) matrix that mixes the heads before softmax.
    Requires: the scale and the head mixing are folded; no scale directly precedes a mask (`merge_scale`).
    Unchanged: a scale that is separated from the head mixing by another step, such as a masked diagonal.
    Ensures: no scale directly precedes a head mixing.
    """
    changed = []
    for name, scores in attention_scores(model):
        roles = [step.role for _, step in scores.steps_before()]
        if ("scale", "mask") in pairwise(roles) and "mixing" in roles:
            raise FoldError(
                f"{name}: a mask multiplies the scaled scores; run merge_scale, which merges the scale into the mask, "
                "before merge_scale_into_mixing"
            )
        if merge_scale_into("mixing", name, scores):
            changed.append(name)
    return tuple(changed)


def merge_scale_into(role: Role, name: str, scores: AttentionScores) -> bool:
    """Merge each scale of an attention into the next step, if this has the role ``role``; return True if one did."""
    merged = False
    while pair := _adjacent(scores, "scale", role):
        (scale_name, scale), (next_name, following) = pair
        if not scale.is_constant or not following.is_constant:
            what = _WORDS.get(role, role)
            raise FoldError(
                f"{name}: the scale and the {what} must be constants before a merge; run the folding passes first"
            )
        scores.put(next_name, following.after_factor(scale.matrix()))
        scores.put(scale_name, None)
        merged = True
    return merged


def _adjacent(scores: AttentionScores, first_role: Role, second_role: Role) -> _Pair | None:
    for first, second in pairwise(scores.steps_before()):
        if first[1].role == first_role and second[1].role == second_role:
            return first, second
    return None


def require_constant_steps(model: nn.Module) -> None:
    """Errors: FoldError that lists every step that is not a constant."""
    left = [
        f"{name}.scores.{step_name} ({step.role})"
        for name, scores in attention_scores(model)
        for step_name, step in scores.steps()
        if not step.is_constant
    ]
    if left:
        raise FoldError(f"no folding pass replaced these steps by constants: {', '.join(left)}")


def _fold_role(model: nn.Module, role: Role) -> tuple[str, ...]:
    changed = []
    for name, scores in attention_scores(model):
        trained = [
            (step_name, step) for step_name, step in scores.steps() if step.role == role and not step.is_constant
        ]
        for step_name, step in trained:
            _require_foldable(name, step, training=model.training)
            folded = step.folded()
            if not folded.matrix().equal(step.matrix()):
                raise FoldError(f"{name}: the folded {_WORDS[role]} is not bitwise equal to the trained {_WORDS[role]}")
            scores.put(step_name, folded)
        if trained:
            changed.append(name)
    return tuple(changed)


def _require_foldable(name: str, step: Step, *, training: bool) -> None:
    what = _WORDS[step.role]
    if training:
        raise FoldError("the model is in training mode; folding is for inference", hint="call model.eval()")
    state = [tensor for tensor in (*step.parameters(), *step.buffers()) if tensor.is_floating_point()]
    if narrow := sorted({str(tensor.dtype) for tensor in state if tensor.dtype not in _FOLDABLE}):
        raise FoldError(
            f"{name}: the {what} has tensors of {', '.join(narrow)}, expected float32 or float64; "
            "fold the model before casting it"
        )
    matrix = step.matrix()
    sound = matrix.isfinite() | (matrix.isneginf() if step.allows_minus_infinity else False)
    if not bool(sound.all()):
        raise FoldError(f"{name}: the {what} has NaN or infinite entries")


_TOKENS = 3


@torch.no_grad()
def merge_temperature_into_query(model: nn.Module) -> tuple[str, ...]:
    """Multiply the rows of the Q projection by the temperatures.

    t[h] · (W[h] x + b[h]) Kᵀ  →  (t[h]·W[h] x + t[h]·b[h]) Kᵀ, with W[h] and b[h] the rows of head h

    Requires: folded scales.
    Unchanged: the scale d^(−1/2), which is the same for all heads; a temperature behind another step; and an attention
    whose Q projection is not a linear layer.
    Ensures: no temperature is the first step of an attention with a linear Q projection, and in float64 the new Q
    projection gives the old Q times the temperatures, up to rounding.
    """
    changed = []
    for name, scores in attention_scores(model):
        rows = query_rows(model.get_submodule(name))
        while rows is not None and (first := _first_temperature(name, scores)):
            step_name, step = first
            linear, count = rows
            temperatures = step.matrix().flatten()
            factors = temperatures.repeat_interleave(count // len(temperatures))
            before = _queries(linear, count)
            linear.weight[:count] *= factors[:, None]
            if linear.bias is not None:
                linear.bias[:count] *= factors
            if not torch.allclose(_queries(linear, count), before * factors.double(), rtol=1e-5, atol=1e-6):
                raise FoldError(f"{name}: merge_temperature_into_query changed Q by more than rounding")
            scores.put(step_name, None)
            changed.append(name)
    return tuple(dict.fromkeys(changed))


def _first_temperature(name: str, scores: AttentionScores) -> tuple[str, Step] | None:
    steps = scores.steps_before()
    if not steps or steps[0][1].role != "scale":
        return None
    if not steps[0][1].is_constant:
        raise FoldError(f"{name}: the temperature must be a constant; run fold_scales first")
    return steps[0] if isinstance(steps[0][1], Constant) else None


def _queries(linear: nn.Linear, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(_TOKENS, linear.in_features, dtype=torch.float64, generator=generator)
    bias = None if linear.bias is None else linear.bias[:rows].double()
    return nn.functional.linear(tokens, linear.weight[:rows].double(), bias)
