"""Fold a trained model: replace every computation that does not depend on the input by constants.

P = after(softmax(before(Q Kᵀ))) V
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.families import family_of
from gmmvit_deploy.models.folding.dead_masks import drop_dead_masks
from gmmvit_deploy.models.folding.engine_forms import pad_heads, separate_projections
from gmmvit_deploy.models.folding.passes import (
    FoldingPass,
    fold_biases,
    fold_masks,
    fold_scales,
    merge_biases,
    merge_scale,
    merge_scale_into_mixing,
    merge_temperature_into_query,
    require_constant_steps,
)
from gmmvit_deploy.models.layers.blocks import PreNormBlock
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.layers.roles import with_role
from gmmvit_deploy.models.scores.attention import attention_scores
from gmmvit_deploy.models.scores.step import Step
from gmmvit_deploy.models.specs import ModelSpec


@torch.no_grad()
def narrow_last_block(model: Model) -> tuple[str, ...]:
    """Rewrite the last block so that the block computes only the output that the rest of the network reads.

    Class token:  (x + mlp(norm(x)))[0]  →  x[0] + mlp(norm(x[0]))
    Mean:         mean(x + W·h + b)  →  mean(x) + W·mean(h) + b

    x: the sum of the block's input and the output of the attention.  h: gelu(first linear layer of norm(x)).  W and b:
    of the second linear layer of the mlp.  The block then outputs a single token, which both poolings return unchanged.
    Unchanged: a network without `Family.last_block`, for example because a norm precedes the mean.
    Ensures: in float64 the new block outputs the first token, or the mean of the tokens, of the old block, up to
    rounding.
    """
    last = family_of(model.spec).last_block(model.spec)
    if last is None:
        return ()
    name, reads_first, n = last.name, last.reads == "first", last.tokens
    block = model.get_submodule(name)
    if not isinstance(block, PreNormBlock) or block.gives != "tokens":
        return ()
    before = copy.deepcopy(block).double()
    block.gives = "first" if reads_first else "mean"
    if not reads_first:
        with_role(block.mlp[-1], "head")  # the input of this layer is now a row per image
    width = block.attention_norm.normalized_shape[0]
    tokens = torch.randn(2, n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = before(tokens)
    expected = expected[:, :1] if reads_first else expected.mean(dim=1, keepdim=True)
    narrowed = copy.deepcopy(block).double()(tokens)
    if not torch.allclose(narrowed, expected, rtol=1e-9, atol=1e-12):
        off = float((narrowed - expected).abs().max())
        raise FoldError(
            f"{name}: narrow_last_block changed the {block.gives} of the output tokens by {off:.2e}; expected no change"
        )
    return (name,)


SCORE_PASSES: tuple[FoldingPass, ...] = (
    fold_scales,
    fold_masks,
    drop_dead_masks,
    fold_biases,
    merge_biases,
    merge_temperature_into_query,
    merge_scale,
    merge_scale_into_mixing,
)
"""Passes on the steps of every attention, in execution order.  A pass may require a condition that an earlier pass
ensures."""


def folding_passes(spec: ModelSpec) -> tuple[FoldingPass, ...]:
    """Return the shared passes and the passes of the family that `fold` runs for this spec, in execution order."""
    return (*SCORE_PASSES, *family_of(spec).network().folding_passes, narrow_last_block)


def engine_passes(spec: ModelSpec, *, padded: bool = True, quantized: bool = False) -> tuple[FoldingPass, ...]:
    """Return the passes that make a folded model fit the fused attention kernels of GPU engines.

    quantized: also split the stacked projections of Q, K and V, for int8 and fp8.
    """
    return (
        *family_of(spec).network().engine_passes,
        *((pad_heads,) if padded else ()),
        *((separate_projections,) if quantized else ()),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoldedConstant:
    """The constant that folding stored for a step of an attention, such as ``before.mask``.

    trained: the matrix of the trained step.
    constant: the matrix in the folded model: M · d^(−1/2) if the scale was merged into a mask M.
    """

    layer: str
    step: str
    role: Role
    trained: Tensor
    constant: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoldedModel:
    """A folded model, with the constants of all remaining steps in the order in which the model applies them.

    passes: name of a pass → names of the modules or parameters that the pass changed.
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
def fold(model: Model, *, in_place: bool = False) -> FoldedModel:
    """Run every folding pass on a copy of ``model``, or on ``model`` itself with ``in_place``, which saves its memory.

    Example: ``fold(load_checkpoint("checkpoint.pth").model).masks``.

    Errors: FoldError when the requirements or the end state of a pass do not hold, or when no pass folds a step.
    """
    trained = {key: step.matrix().detach().clone() for key, step in _steps(model).items()}
    folded = (model if in_place else copy.deepcopy(model)).requires_grad_(False)
    changed = {run.__name__: run(folded) for run in folding_passes(model.spec)}
    require_constant_steps(folded)
    return FoldedModel(
        model=folded,
        passes=changed,
        constants=tuple(
            FoldedConstant(
                layer=layer,
                step=name,
                role=step.role,
                trained=trained[layer, name],
                constant=step.matrix().clone(),
            )
            for (layer, name), step in _steps(folded).items()
        ),
    )


@torch.no_grad()
def fold_for_engines(folded: FoldedModel, passes: Sequence[FoldingPass] | None = None) -> FoldedModel:
    """Run the passes for GPU engines, by default `engine_passes`, on a copy of a folded model."""
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
            if (constant.layer, constant.step) in steps  # a pass such as widen_heads can remove steps
        ),
    )


def _steps(model: Model) -> dict[tuple[str, str], Step]:
    return {(layer, name): step for layer, scores in attention_scores(model) for name, step in scores.steps()}
