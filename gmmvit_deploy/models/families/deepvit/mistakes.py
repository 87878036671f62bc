"""Usual mistakes in a DeepViT.  The steps on the attention scores have mistakes of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import nn

from gmmvit_deploy.models.families.deepvit.folding import merge_head_norm
from gmmvit_deploy.models.families.deepvit.model import DeepViTBlock
from gmmvit_deploy.models.families.family import Mistake
from gmmvit_deploy.models.layers.blocks import with_other_epsilon
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.scores.heads import HeadBatchNorm, transpose_mixings


def _in_blocks(change: Callable[[DeepViTBlock], None]) -> Callable[[Model], bool]:
    """Return a function that changes every block with a scale adjustment; it returns False without such a block."""

    def apply(model: Model) -> bool:
        blocks = [module for module in model.modules() if isinstance(module, DeepViTBlock)]
        adjusted = [block for block in blocks if block.scale_adjustment != 1]
        for block in adjusted:
            change(block)
        return bool(adjusted)

    return apply


def _leave_out(block: DeepViTBlock) -> None:
    block.scale_adjustment = 1.0


def _leave_out_of_branches(block: DeepViTBlock) -> None:
    for last in (block.attention.out, block.mlp[-1]):
        linear = cast("nn.Linear", last)
        for tensor in (linear.weight, linear.bias):
            tensor.data = tensor.data * block.scale_adjustment


def _merged_mixing_transposed(model: Model) -> bool:
    """Transpose the head mixing of a folded graph: each row of the matrix holds the factor of a BatchNorm."""
    merge_head_norm(model)
    return transpose_mixings(model, "after")


def _every_epsilon(model: Model) -> bool:
    # The heads alone are a mistake of the step `HeadBatchNorm`.
    return with_other_epsilon(model) and with_other_epsilon(model, HeadBatchNorm)


MISTAKES: tuple[Mistake, ...] = (
    ("the scale adjustment left out", _in_blocks(_leave_out)),
    ("the branches not divided by the scale adjustment", _in_blocks(_leave_out_of_branches)),
    ("head mixing transposed after folding has merged BatchNorm into the head mixing", _merged_mixing_transposed),
    ("BatchNorm of the stem with an epsilon of 0.001", with_other_epsilon),
    ("every BatchNorm with an epsilon of 0.001", _every_epsilon),
)
