"""EANet: merge the memories with the linear maps before and after them, and make the class token a constant row."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.families.eanet.model import (
    ClassRowFirst,
    ClassTokenFirst,
    EANet,
    ExternalAttention,
    MergedExternalAttention,
    TokenTransformer,
)
from gmmvit_deploy.models.layers.roles import with_role
from gmmvit_deploy.models.layers.unfolding import Unfold, unfolds_as_convolutions

_TOKENS = 5
_Module = TypeVar("_Module", bound=nn.Module)


def unfold_as_convolution(model: nn.Module) -> tuple[str, ...]:
    """Replace each `Unfold` by a convolution with one-hot filters.

    Ensures: no `Unfold` remains, and on random inputs each convolution outputs the same values as the `Unfold` that the
    convolution replaces.
    Returns the names of the replaced modules.
    Errors: FoldError when the values differ or an `Unfold` remains.
    """
    if not isinstance(model, EANet):
        return ()
    changed = unfolds_as_convolutions("unfolds", model.unfolds, model.unfolded_channels)
    if any(isinstance(module, Unfold) for module in model.modules()):
        raise FoldError("an Unfold module remains after every unfold of the model was replaced")
    return changed


@torch.no_grad()
def merge_memories(model: nn.Module) -> tuple[str, ...]:
    """Merge both memories of each block with their neighbours, and drop the biases before the softmax.

        M₀ (W_t[h] x + b_t[h]) + l₀        →  (M₀ W_t[h]) x           for each head h
        Σ_h W_p[h] (M₁ w[h] + m₁) + b_p    →  Σ_h (W_p[h] M₁) w[h] + (b_p + Σ_h W_p[h] m₁)

    W_t and b_t are the linear map before M₀, W_p and b_p the linear map after M₁, and w[h] the weights of head h. The
    softmax over the tokens ignores M₀ b_t[h] + l₀, which is the same for all tokens. The matrices are computed in
    float64.
    Ensures: in float64 the merged attention and the trained attention output the same values, up to rounding.
    Returns the names of the changed attentions.
    Errors: FoldError when the outputs differ.
    """
    if not isinstance(model, EANet):
        return ()
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
    _require_equal(name, exact, attention, dim)
    return exact.to(attention.out.weight.dtype)


@torch.no_grad()
def merge_token_memories(model: nn.Module) -> tuple[str, ...]:
    """Merge the second memory of each token transformer with the linear map after the memory.

    W_p (M₁ w + m₁) + b_p  →  (W_p M₁) w + (W_p m₁ + b_p)

    The first memory stays: the skip connection also reads the input of this memory, and a merged matrix would multiply
    the wider input of the token transformer.
    Requirements, end state and errors are the same as for `merge_memories`.
    Returns the names of the changed token transformers.
    """
    if not isinstance(model, EANet):
        return ()
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
        _require_equal(name, after, transformer, transformer.project.in_features)
        transformer.from_slots = nn.Identity()
        transformer.out = with_role(merged.to(transformer.project.weight.dtype), "projection")
        changed.append(name)
    return tuple(changed)


@torch.no_grad()
def class_token_as_row(model: nn.Module) -> tuple[str, ...]:
    """Add the position of the class token to the class token, and the bias of the projection to the other positions.

    [c; W t + b] + P  →  [c + P[0]; W t + (b + P[1:])]

    Ensures: in float64 both forms output the same tokens, up to rounding.
    Returns the names of the changed modules.
    Errors: FoldError when the tokens differ.
    """
    if not isinstance(model, EANet) or not isinstance(model.positions, ClassTokenFirst):
        return ()
    project, stored = model.project, model.positions
    positions = stored.position_embedding
    row = stored.class_token.double() + positions[:, :1]
    others = project.bias.double() + positions[:, 1:]
    bare = nn.Linear(project.in_features, project.out_features, bias=False).requires_grad_(False)
    bare.weight = project.weight
    before = nn.Sequential(_double(project), _double(stored))
    after = nn.Sequential(_double(bare), ClassRowFirst(row, others))
    _require_equal("positions", after, before, project.in_features, tokens=others.shape[1])
    model.project = with_role(bare, "projection")
    model.positions = ClassRowFirst(row.to(positions.dtype), others.to(positions.dtype))
    return "project", "positions"


def _double(module: _Module) -> _Module:
    return copy.deepcopy(module).double()


def _require_equal(name: str, after: nn.Module, before: nn.Module, width: int, *, tokens: int = _TOKENS) -> None:
    """Check that two modules in float64 map random tokens to the same values.  Errors: FoldError when they differ."""
    generator = torch.Generator().manual_seed(0)
    x: Tensor = torch.randn(2, tokens, width, dtype=torch.float64, generator=generator)
    expected, merged = _double(before)(x), after(x)
    if not torch.allclose(merged, expected, rtol=1e-9, atol=1e-12):
        off = float((merged - expected).abs().max())
        raise FoldError(f"{name}: folding changed the output by {off:.2e}; expected no change")
