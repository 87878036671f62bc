"""Usual mistakes in external attention, made on purpose in a copy of a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gmmvit_deploy.models.families.eanet.model import SLOT_SUM_EPS, ExternalAttention, SlotWeights, TokenTransformer
from gmmvit_deploy.models.families.family import Mistake
from gmmvit_deploy.models.layers.model import Model


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


@torch.no_grad()
def _softmax_over_slots_without_biases(model: Model) -> bool:
    """As in a folded graph, without the biases that folding drops: a softmax over the slots does not ignore them."""
    for module in model.modules():
        if isinstance(module, ExternalAttention):
            for layer in (module.project, module.to_slots):
                layer.bias.zero_()
    return _replaced(model, _SoftmaxOverSlots)


def _replaced(model: Model, kind: type[SlotWeights]) -> bool:
    weights = [module for module in model.modules() if isinstance(module, SlotWeights)]
    for module in weights:
        module.__class__ = kind
    return bool(weights)


@torch.no_grad()
def _memory_without_strides(model: Model) -> bool:
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


MISTAKES: tuple[Mistake, ...] = (
    ("softmax over the slots in place of the tokens", lambda model: _replaced(model, _SoftmaxOverSlots)),
    (
        "softmax over the slots in place of the tokens, without the biases that folding drops",
        _softmax_over_slots_without_biases,
    ),
    ("no division by the sum over the slots", lambda model: _replaced(model, _NoSlotSum)),
    ("the second memory of the token transformers read without its strides", _memory_without_strides),
)
