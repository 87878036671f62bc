"""Merge the learned temperature of each head into the weights that compute Q."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.layers.attention import query_rows
from gmmvit_deploy.models.scores.attention import AttentionScores, attention_scores
from gmmvit_deploy.models.scores.step import Constant, Step

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
    Returns the names of the changed attentions.
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
