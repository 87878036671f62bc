"""Usual mistakes in external attention, made on purpose in a copy of a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gmmvit_deploy.models.families.eanet.model import (
    SLOT_SUM_EPS,
    ExternalAttention,
    SlotWeights,
    TokenTransformer,
)


class _SoftmaxOverSlots(SlotWeights):
    """Softmax over the slots of each token, as in an attention whose keys are the slots."""

    def forward(self, logits: Tensor, *, first: bool = False) -> Tensor:
        by_head = torch.softmax(logits.unflatten(-1, (-1, self.slots)), dim=-1)
        weights = (by_head / (SLOT_SUM_EPS + by_head.sum(dim=-1, keepdim=True))).flatten(-2)
        return weights[:, :1] if first else weights


class _NoSlotSum(SlotWeights):
    """Softmax over the tokens without the division by the sum over the slots."""

    def forward(self, logits: Tensor, *, first: bool = False) -> Tensor:
        weights = torch.softmax(logits, dim=1)
        return weights[:, :1] if first else weights


def softmax_over_slots(model: nn.Module) -> bool:
    """Replace the softmax over the tokens by a softmax over the slots; return True if the model has such a softmax."""
    return _replaced(model, _SoftmaxOverSlots)


@torch.no_grad()
def softmax_over_slots_without_biases(model: nn.Module) -> bool:
    """Make the same mistake in a network without the biases that folding drops.

    A softmax over the slots does not ignore these biases, so the mistake in a folded graph gives other logits.
    """
    for module in model.modules():
        if isinstance(module, ExternalAttention):
            for layer in (module.project, module.to_slots):
                layer.bias.zero_()
    return softmax_over_slots(model)


def no_slot_sum(model: nn.Module) -> bool:
    """Omit the division by the sum over the slots; return True if the model has such a division."""
    return _replaced(model, _NoSlotSum)


def _replaced(model: nn.Module, kind: type[SlotWeights]) -> bool:
    weights = [module for module in model.modules() if isinstance(module, SlotWeights)]
    for module in weights:
        module.__class__ = kind
    return bool(weights)


@torch.no_grad()
def memory_without_strides(model: nn.Module) -> bool:
    """Read the second memory of each token transformer, which files store transposed, in the order of the storage."""
    memories = [
        module.from_slots
        for module in model.modules()
        if isinstance(module, TokenTransformer) and isinstance(module.from_slots, nn.Linear)
    ]
    for memory in memories:
        stored = memory.weight.t().contiguous()
        memory.weight.copy_(stored.view_as(memory.weight))
    return bool(memories)
