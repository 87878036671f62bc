"""Fold a trained model: replace everything that does not depend on the input by constants.

P = after(softmax(before(Q Kᵀ))) V        every step before and after softmax is a constant
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gmmvit_deploy.families import family_of
from gmmvit_deploy.folding.head_padding import pad_heads
from gmmvit_deploy.folding.last_block import narrow_last_block
from gmmvit_deploy.folding.passes import (
    FoldingPass,
    fold_biases,
    fold_masks,
    fold_scales,
    merge_scale,
    merge_scale_into_mixing,
    require_constant_steps,
)
from gmmvit_deploy.folding.projections import separate_projections
from gmmvit_deploy.layers.model import Model
from gmmvit_deploy.precision import Role
from gmmvit_deploy.scores.attention import attention_scores
from gmmvit_deploy.scores.step import Step
from gmmvit_deploy.specs import ModelSpec

__all__ = [
    "SCORE_PASSES",
    "FoldedConstant",
    "FoldedModel",
    "engine_passes",
    "fold",
    "fold_for_engines",
    "folding_passes",
]

SCORE_PASSES: tuple[FoldingPass, ...] = (fold_scales, fold_masks, fold_biases, merge_scale, merge_scale_into_mixing)
"""Passes on the steps of every attention, in execution order: a pass may require what an earlier pass ensures."""


def folding_passes(spec: ModelSpec) -> tuple[FoldingPass, ...]:
    """Return the passes of `fold` for a model of this spec, in execution order: shared passes and its family's own."""
    return (*SCORE_PASSES, *family_of(spec).folding_passes(), narrow_last_block)


def engine_passes(spec: ModelSpec, *, padded: bool = True, quantized: bool = False) -> tuple[FoldingPass, ...]:
    """Return the passes that help GPU engines but not CPUs: they enable fused attention kernels.

    padded: also pad head dims that do not fuse without copies.  quantized: also separate the projections for int8, fp8.
    """
    return (
        *family_of(spec).engine_passes(),
        *((pad_heads,) if padded else ()),
        *((separate_projections,) if quantized else ()),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoldedConstant:
    """The constant of a step of an attention.

    layer: name of the attention.  step: name of the step, such as ``before.mask``.  role: in the precision policy.
    trained: matrix of the trained step.  constant: matrix in the folded model; for a mask, M · d^(−1/2).
    """

    layer: str
    step: str
    role: Role
    trained: Tensor
    constant: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoldedModel:
    """A folded model.

    model: a new module that shares no weights.  passes: pass → names of the changed parts.
    constants: of every remaining step, in the order in which the steps are applied.
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
    """Run every folding pass on a copy of ``model``; ``model`` itself does not change.

    Folding a folded model gives the same model and an empty tuple for every pass.
    Errors: FoldError when a pass cannot start or cannot prove its end state, or when a step remains that no pass folds.
    """
    folded = copy.deepcopy(model).requires_grad_(False)
    passes = {run.__name__: run(folded) for run in folding_passes(model.spec)}
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
def fold_for_engines(folded: FoldedModel, passes: Sequence[FoldingPass] | None = None) -> FoldedModel:
    """Run the passes for GPU engines on a copy of a folded model.  passes: `engine_passes` by default.

    Errors: FoldError when a pass cannot start or cannot prove its end state.
    """
    model = copy.deepcopy(folded.model)
    passes = engine_passes(model.spec) if passes is None else passes
    changed = {run.__name__: run(model) for run in passes}
    steps = _steps(model)
    return FoldedModel(
        model=model,
        passes={**folded.passes, **changed},
        constants=tuple(
            replace(constant, constant=steps[constant.layer, constant.step].matrix().clone())
            for constant in folded.constants
            if (constant.layer, constant.step) in steps  # wide heads have no mixing
        ),
    )


def _steps(model: Model) -> dict[tuple[str, str], Step]:
    """Return (name of the attention, name of the step) → step."""
    return {(layer, name): step for layer, scores in attention_scores(model) for name, step in scores.steps()}
