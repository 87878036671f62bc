"""Try a change of a network of another package on a copy, and make the change only if the logits stay the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.specs import input_shape

_IMAGES = 2
_ROUNDING = 1e-5
"""Largest change of the float64 logits, relative to the largest logit. Merged weights such as γ ∘ W are rounded to
float32, which changes the logits by about 1e-6; a wrong change changes them by far more."""


@torch.no_grad()
def tried(model: Model, change: Callable[[Any], tuple[str, ...]]) -> tuple[str, ...]:
    """Apply ``change`` to the network of ``model`` if a copy shows that the logits do not change.

    change: function that changes a model and returns the names of the changed modules.
    """
    trial = copy.deepcopy(model)
    if not change(trial):
        return ()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(_IMAGES, *input_shape(model.spec), dtype=torch.float64, generator=generator)
    logits = trial.double()(images)
    del trial  # a copy in float64 has twice the memory of the weights
    expected = copy.deepcopy(model).double()(images)
    scale = float(expected.abs().max())
    if not float((logits - expected).abs().max()) <= _ROUNDING * max(scale, 1.0):
        return ()
    return change(model)
