"""EANet: merge the memories with the linear maps before and after them, and make the class token a constant row."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import nn

from gmmvit_deploy.models.families.eanet.model import (
    ClassRowFirst,
    ClassTokenFirst,
    ExternalAttention,
    MergedExternalAttention,
    TokenTransformer,
)
from gmmvit_deploy.models.layers.proofs import random_values, require_same_output
from gmmvit_deploy.models.layers.roles import with_role

_TOKENS = 5
_Module = TypeVar("_Module", bound=nn.Module)


@torch.no_grad()
def merge_memories(model: Any) -> tuple[str, ...]:
    """Merge both memories of each block with their neighbours, and drop the biases before the softmax.

        M₀ (W_t[h] x + b_t[h]) + l₀        →  (M₀ W_t[h]) x           for each head h
        Σ_h W_p[h] (M₁ w[h] + m₁) + b_p    →  Σ_h (W_p[h] M₁) w[h] + (b_p + Σ_h W_p[h] m₁)

    W_t and b_t are the linear map before M₀, W_p and b_p the linear map after M₁, and w[h] the weights of head h. The
    softmax over the tokens ignores M₀ b_t[h] + l₀, which is the same for all tokens. The matrices are computed in
    float64.
    Ensures: in float64 the merged attention and the trained attention output the same values, up to rounding.
    """
    changed = []
    for index, block in enumerate(model.blocks):
        if isinstance(block.attention, ExternalAttention):
            name = f"blocks.{index}.attention"
            block.attention = _merged(name, block.attention)
            changed.append(name)
    return tuple(changed)


def _merged(name: str, attention: ExternalAttention) -> MergedExternalAttention:
    heads, slots, dim = attention.heads, attention.weights.slots, attention.project.in_features
    exact = MergedExternalAttention(dim=dim, heads=heads, slots=slots).double().requires_grad_(False)
    memory, values = attention.to_slots.weight.double(), attention.from_slots.weight.double()
    project = attention.project.weight.double().unflatten(0, (heads, -1))
    out = attention.out.weight.double().unflatten(1, (heads, -1))
    exact.to_slots.weight.copy_((memory @ project).flatten(0, 1))
    exact.out.weight.copy_((out @ values).flatten(1))
    exact.out.bias.copy_(attention.out.bias.double() + out.sum(dim=1) @ attention.from_slots.bias.double())
    require_same_output(f"{name}: folding", attention, exact, random_values(2, _TOKENS, dim))
    return exact.to(attention.out.weight.dtype)


@torch.no_grad()
def merge_token_memories(model: Any) -> tuple[str, ...]:
    """Merge the second memory of each token transformer with the linear map after the memory.

    W_p (M₁ w + m₁) + b_p  →  (W_p M₁) w + (W_p m₁ + b_p)

    The first memory stays: the skip connection also reads the input of this memory, and a merged matrix would multiply
    the wider input of the token transformer.
    Ensures: as `merge_memories`, for the token transformer.
    """
    changed = []
    for index, transformer in enumerate(model.token_transformers):
        if not isinstance(transformer, TokenTransformer) or not isinstance(transformer.from_slots, nn.Linear):
            continue
        name = f"token_transformers.{index}"
        memory, out = _double(transformer.from_slots), _double(transformer.out)
        merged = nn.Linear(memory.in_features, out.out_features).double().requires_grad_(False)
        merged.weight.copy_(out.weight @ memory.weight)
        merged.bias.copy_(out.weight @ memory.bias + out.bias)
        after = _double(transformer)
        after.from_slots, after.out = nn.Identity(), merged
        x = random_values(2, _TOKENS, transformer.project.in_features)
        require_same_output(f"{name}: folding", transformer, after, x)
        transformer.from_slots = nn.Identity()
        transformer.out = with_role(merged.to(transformer.project.weight.dtype), "projection")
        changed.append(name)
    return tuple(changed)


@torch.no_grad()
def class_token_as_row(model: Any) -> tuple[str, ...]:
    """Add the position of the class token to the class token, and the bias of the projection to the other positions.

    [c; W t + b] + P  →  [c + P[0]; W t + (b + P[1:])]

    Ensures: in float64 both forms output the same tokens, up to rounding.
    """
    if not isinstance(model.positions, ClassTokenFirst):
        return ()
    project, stored = model.project, model.positions
    positions = stored.position_embedding
    row = stored.class_token.double() + positions[:, :1]
    others = project.bias.double() + positions[:, 1:]
    bare = nn.Linear(project.in_features, project.out_features, bias=False).requires_grad_(False)
    bare.weight = project.weight
    tokens = random_values(2, others.shape[1], project.in_features)
    before, after = nn.Sequential(project, stored), nn.Sequential(bare, ClassRowFirst(row, others))
    require_same_output("positions: folding", before, after, tokens)
    model.project = with_role(bare, "projection")
    model.positions = ClassRowFirst(row.to(positions.dtype), others.to(positions.dtype))
    return "project", "positions"


def _double(module: _Module) -> _Module:
    return copy.deepcopy(module).double()
