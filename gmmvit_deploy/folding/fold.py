"""Trained model → the same function with plain constants where it had computations.

P = after(softmax(before(Q Kᵀ))) V        every step before and after softmax a constant
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gmmvit_deploy.folding.cait_passes import merge_layer_scale, merge_scale_into_mixing
from gmmvit_deploy.folding.head_padding import pad_heads
from gmmvit_deploy.folding.last_block import narrow_last_block
from gmmvit_deploy.folding.passes import (
    FoldingPass,
    fold_biases,
    fold_masks,
    fold_scales,
    merge_scale,
    require_constant_steps,
)
from gmmvit_deploy.folding.projections import separate_projections
from gmmvit_deploy.folding.t2t_passes import drop_unused, unfold_as_convolution
from gmmvit_deploy.folding.wide_heads import widen_heads
from gmmvit_deploy.folding.window_passes import join_windows
from gmmvit_deploy.models.build import Model
from gmmvit_deploy.precision import Role
from gmmvit_deploy.scores.attention import attention_scores
from gmmvit_deploy.scores.step import Step

__all__ = ["ENGINE_PASSES", "PASSES", "QUANTIZED_PASSES", "FoldedConstant", "FoldedModel", "fold", "fold_for_engines"]

PASSES: tuple[FoldingPass, ...] = (
    fold_scales,
    fold_masks,
    fold_biases,
    merge_scale,
    merge_scale_into_mixing,
    merge_layer_scale,
    unfold_as_convolution,
    drop_unused,
    narrow_last_block,
)
"""In the order in which they run: each may require what an earlier one ensures."""

ENGINE_PASSES: tuple[FoldingPass, ...] = (join_windows, widen_heads, pad_heads)
"""What GPU engines gain by and CPUs do not: the forms that become one fused attention kernel."""

QUANTIZED_PASSES: tuple[FoldingPass, ...] = (*ENGINE_PASSES, separate_projections)
"""And what int8 and fp8 need besides."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoldedConstant:
    """The constant of one step of one attention.

    layer: name of the attention.  step: of the step, as ``before.mask``.  role: in the precision policy.
    trained: the matrix as the trained step uses it.  constant: as the folded model uses it, for a mask M · d^(−1/2).
    """

    layer: str
    step: str
    role: Role
    trained: Tensor
    constant: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoldedModel:
    """model: a new module, its weights shared with nothing.  passes: pass → what it changed.

    constants: of every step that is left, in the order in which they are applied.
    """

    model: Model
    passes: dict[str, tuple[str, ...]]
    constants: tuple[FoldedConstant, ...]

    @property
    def masks(self) -> tuple[FoldedConstant, ...]:
        return tuple(constant for constant in self.constants if constant.role == "mask")

    @property
    def biases(self) -> tuple[FoldedConstant, ...]:
        return tuple(constant for constant in self.constants if constant.role == "score_bias")


@torch.no_grad()
def fold(model: Model) -> FoldedModel:
    """Run every pass on a copy of ``model``, which itself stays as it is.

    Folding a folded model gives the same model and an empty list for every pass.
    Errors: FoldError when a pass cannot start or cannot prove its end, or a step is left that no pass folds.
    """
    folded = copy.deepcopy(model).requires_grad_(False)
    passes = {run.__name__: run(folded) for run in PASSES}
    require_constant_steps(folded)
    trained = _steps(model)
    return FoldedModel(
        model=folded,
        passes=passes,
        constants=tuple(
            FoldedConstant(
                layer=layer,
                step=name,
                role=step.role,
                trained=trained[layer, name].matrix().detach().clone(),
                constant=step.matrix().clone(),
            )
            for (layer, name), step in _steps(folded).items()
        ),
    )


@torch.no_grad()
def fold_for_engines(folded: FoldedModel, passes: Sequence[FoldingPass] = ENGINE_PASSES) -> FoldedModel:
    """Run the passes for GPU engines on a copy of a folded model.

    Errors: FoldError when a pass cannot start or cannot prove its end.
    """
    model = copy.deepcopy(folded.model)
    changed = {run.__name__: run(model) for run in passes}
    steps = _steps(model)
    return FoldedModel(
        model=model,
        passes={**folded.passes, **changed},
        constants=tuple(
            replace(constant, constant=steps[constant.layer, constant.step].matrix().clone())
            for constant in folded.constants
            if (constant.layer, constant.step) in steps  # wide heads have no mixing left
        ),
    )


def _steps(model: Model) -> dict[tuple[str, str], Step]:
    """(name of the attention, name of the step) → step."""
    return {(layer, name): step for layer, scores in attention_scores(model) for name, step in scores.steps()}
