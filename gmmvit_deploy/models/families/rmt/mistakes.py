"""Usual mistakes in an RMT.  The mistakes with the decay are in `scores.biases.ManhattanDecay`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from gmmvit_deploy.models.families.family import Mistake
from gmmvit_deploy.models.families.rmt.model import (
    RMT,
    DecomposedAttention,
    FoldedRotation,
    ManhattanAttention,
    PairRotation,
    RMTBlock,
    RMTMlp,
    Stage,
)
from gmmvit_deploy.models.layers.blocks import with_other_epsilon
from gmmvit_deploy.models.layers.model import Model


def _rotation_left_out(model: Model) -> bool:
    def leave_out(stage: Stage, rotation: PairRotation) -> None:
        stage.rotation = None

    return _with_rotations(model, leave_out)


def _halves_rotated(model: Model) -> bool:
    def halve(stage: Stage, rotation: PairRotation) -> None:
        cos, sin = rotation.tables()
        heads, half = _heads(stage), sin.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        cos, sin = (torch.cat([table] * heads, dim=-1) for table in (cos, sin))
        stage.rotation = FoldedRotation(cos, sin, head_dim=2 * half)

    return _with_rotations(model, halve)


def _columns_first(model: Model) -> bool:
    def count(stage: Stage, rotation: PairRotation) -> None:
        rows, columns = _first_attention(stage).grid
        by_column = rotation.positions.reshape(columns, rows).t()
        rotation.positions = by_column.reshape(rotation.positions.shape)

    return _with_rotations(model, count)


def _other_release(model: Model) -> bool:
    return _rotated_by_formula(model) or _without_parts_of_2024(model)


def _without_parts_of_2024(model: Model) -> bool:
    changed = _rotation_left_out(model)
    for module in model.modules():
        if isinstance(module, RMTMlp) and module.convolution is not None:
            module.convolution = None
            changed = True
    return changed


def _rotated_by_formula(model: Model) -> bool:
    """Rotate Q and K of a network of 2023, whose files store angles that the network does not read."""
    if not isinstance(model, RMT) or model.spec.rotates:
        return False
    for stage in _stages(model):
        attention = _first_attention(stage)
        stage.rotation = PairRotation(attention.out.in_features // _heads(stage), attention.token_shape())
    return True


def _stages(model: nn.Module) -> Iterator[Stage]:
    for module in list(model.modules()):
        if isinstance(module, Stage):
            yield module


def _first_attention(stage: Stage) -> ManhattanAttention:
    return next(module for module in stage.modules() if isinstance(module, ManhattanAttention))


def _heads(stage: Stage) -> int:
    return _first_attention(stage).attentions()[0].heads


def _with_rotations(model: Model, change: Callable[[Stage, PairRotation], None]) -> bool:
    changed = False
    for stage in _stages(model):
        if isinstance(stage.rotation, PairRotation):
            change(stage, stage.rotation)
            changed = True
    return changed


def _replaced(model: Model, old: type[ManhattanAttention], new: type[ManhattanAttention]) -> bool:
    """Replace each attention of the class ``old`` by an attention of the class ``new`` with the same weights."""
    changed = False
    for stage in _stages(model):
        for block in stage.modules():
            if isinstance(block, RMTBlock) and type(block.attention) is old:
                block.attention = _of_class(block.attention, new)
                changed = True
        if isinstance(stage.rotation, PairRotation):
            shape = _first_attention(stage).token_shape()
            stage.rotation.positions = stage.rotation.positions.reshape(shape)
    return changed


def _of_class(attention: ManhattanAttention, new: type[ManhattanAttention]) -> ManhattanAttention:
    (part, *_) = attention.attentions()
    other = new(attention.out.in_features, part.heads, attention.grid)
    other.qkv, other.local, other.out = attention.qkv, attention.local, attention.out
    decay = part.scores.get_submodule("before.decay").get_buffer("decay")
    for changed in other.attentions():
        changed.scores.get_submodule("before.decay").get_buffer("decay").copy_(decay)
    return other.to(decay.dtype).eval()


MISTAKES: tuple[Mistake, ...] = (
    (
        "attention to the whole grid in the decomposed stages",
        lambda model: _replaced(model, DecomposedAttention, ManhattanAttention),
    ),
    (
        "decomposed attention in the stages that attend to the whole grid",
        lambda model: _replaced(model, ManhattanAttention, DecomposedAttention),
    ),
    ("rotary position embedding left out", _rotation_left_out),
    ("rotary position embedding of halves of a head in place of pairs", _halves_rotated),
    ("rotary position embedding with positions counted column by column", _columns_first),
    ("the network of another release: 2023 for 2024, or 2024 for 2023", _other_release),
    ("BatchNorm with an epsilon of 1e-3", with_other_epsilon),
)
