"""Self-attention whose scores go through steps, such as a mask, before and after softmax.

    P = after(softmax(before(Q Kᵀ))) V

The attention module of a family contains an `AttentionScores`, unless the attention has no Q Kᵀ: the module of such an
attention computes its softmax itself, and declares the roles of its operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.layers.roles import with_role, with_role_of
from gmmvit_deploy.models.scores.attention import AttentionScores, attention_scores

LARGEST_FUSED = 256
"""The largest head dim with a fused GPU kernel, measured in tensorrt-rtx 1.7.1: head dim 256 fuses, 264 does not."""


def heads_of(x: Float[Tensor, "*batch n inner"], heads: int) -> Float[Tensor, "*batch heads n d"]:
    """Split the last dimension into heads, and move the dimension of the heads before the dimension of the tokens."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(-3, -2)


class SeparateProjections(nn.Module):
    """The parts of a stacked projection as separate linear layers: x → (W_1 x + b_1, W_2 x + b_2, …)."""

    def __init__(self, stacked: nn.Linear, parts: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        biases = [None] * parts if stacked.bias is None else stacked.bias.detach().chunk(parts)
        for weight, bias in zip(stacked.weight.detach().chunk(parts), biases, strict=True):
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None).requires_grad_(False)
            linear.weight.copy_(weight)
            if bias is not None:
                linear.bias.copy_(bias)
            self.parts.append(with_role_of(stacked, linear))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear(x) for linear in self.parts)


def projected(projection: nn.Module, x: Float[Tensor, "*batch n dim"], parts: int) -> tuple[Tensor, ...]:
    """Return Q, K and V, or K and V, from a stacked projection or from `SeparateProjections`."""
    if isinstance(projection, SeparateProjections):
        return projection(x)  # type: ignore[no-any-return]
    return projection(x).chunk(parts, dim=-1)  # type: ignore[no-any-return]


def stacked_projection(module: nn.Module) -> tuple[str, int] | None:
    """Return (name of the attribute, number of parts) for the linear layer that computes Q, K and V, or K and V.

    None for a class that declares no ``stacked_projection``; a class that does applies the layer with `projected`.
    """
    declared: tuple[str, int] | None = getattr(type(module), "stacked_projection", None)
    return declared


def query_rows(module: nn.Module) -> tuple[nn.Linear, int] | None:
    """Return (linear layer, number of its first rows, which compute Q head by head), or None without such a layer."""
    query = getattr(module, "query", None)
    if isinstance(query, nn.Linear):
        return query, query.out_features
    declared = stacked_projection(module)
    stacked = None if declared is None else getattr(module, declared[0])
    if declared is None or declared[1] != 3 or not isinstance(stacked, nn.Linear):
        return None
    return stacked, stacked.out_features // 3


class MaskedAttention(nn.Module):
    """Self-attention whose scores go through steps before and after softmax.

    In Swin, the input has an additional batch dimension for the windows.
    windows: the number of windows that Swin's engine pass turned into heads; None if windows are no heads.
    """

    qkv: nn.Module
    windows: int | None
    stacked_projection: ClassVar[tuple[str, int]] = ("qkv", 3)
    operator_roles: ClassVar[Mapping[str, Role]] = {"softmax": "softmax", "matmul": "product"}

    def __init__(
        self,
        *,
        dim: int,
        heads: int,
        head_dim: int,
        scores: AttentionScores,
        qkv_bias: bool = False,
        projects_output: bool = True,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.windows = None
        self.qkv = with_role(nn.Linear(dim, 3 * heads * head_dim, bias=qkv_bias), "projection")
        self.scores = scores
        self.out = with_role(nn.Linear(heads * head_dim, dim), "projection") if projects_output else nn.Identity()

    def forward(self, x: Float[Tensor, "*batch n dim"]) -> Float[Tensor, "*batch n dim"]:
        query, key, value = (heads_of(part, self.heads) for part in projected(self.qkv, x, 3))
        if self.windows is not None:
            query, key, value = (part.flatten(1, 2) for part in (query, key, value))
        mixed = self.scores.weights(query, key) @ value
        if self.windows is not None:
            mixed = mixed.unflatten(1, (self.windows, self.heads))
        mixed = mixed.transpose(-3, -2).flatten(-2)
        out: Tensor = self.out(mixed)
        return out


class ReAttention(MaskedAttention):
    """`MaskedAttention` with a second summand, which folding makes from offsets of the weights after softmax.

    out[h, i] = Σ_j A[h, i, j] · V[h, j] + f[h] · Σ_j V[h, j]

    value_factor: f, (H, 1), the offset of every weight of head h; None before folding. Neither a weight nor a bias can
    hold the summand, because the sum of V depends on the image.
    """

    operator_roles: ClassVar[Mapping[str, Role]] = {
        **MaskedAttention.operator_roles,
        "sum": "pooling",
        "mul": "pooling",  # not "scale": in 16 bits, a sum over the tokens can overflow
        "add": "residual",
    }
    value_factor: Tensor | None

    def __init__(self, *, dim: int, heads: int, head_dim: int, scores: AttentionScores, qkv_bias: bool = False) -> None:
        super().__init__(dim=dim, heads=heads, head_dim=head_dim, scores=scores, qkv_bias=qkv_bias)
        self.register_buffer("value_factor", None)

    def forward(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch n dim"]:
        parts = projected(self.qkv, x, 3)
        query, key, value = (heads_of(part, self.heads) for part in parts)
        mixed = (self.scores.weights(query, key) @ value).transpose(-3, -2).flatten(-2)
        if self.value_factor is not None:
            total = parts[2].sum(dim=-2, keepdim=True).unflatten(-1, (self.heads, -1))
            mixed = mixed + (total * self.value_factor).flatten(-2)
        out: Tensor = self.out(mixed)
        return out


def masked_attentions(model: nn.Module) -> Iterator[tuple[str, MaskedAttention]]:
    """Yield (name, attention) for every `MaskedAttention` of a model."""
    for name, module in model.named_modules():
        if isinstance(module, MaskedAttention):
            yield name, module


def attentions_without_scores(model: nn.Module) -> tuple[str, ...]:
    """Return the name of each attention without Q Kᵀ, which declares a softmax but contains no `AttentionScores`."""
    with_scores = {name for name, _ in attention_scores(model)}
    return tuple(
        name
        for name, module in model.named_modules()
        if name not in with_scores and "softmax" in getattr(type(module), "operator_roles", {}).values()
    )


def memories(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield (name, layer) of each memory: a linear layer in place of keys or values, for an attention without Q Kᵀ.

    The class of the attention declares the names of the layers, for example ``memories = ("to_slots",)``.
    """
    for name, module in model.named_modules():
        for layer in getattr(type(module), "memories", ()):
            yield f"{name}.{layer}" if name else layer, module.get_submodule(layer)
