"""EANet: external attention on overlapping patches (tokens to token), followed by blocks with external attention.

    t = unfold(image, 7×7, stride 4);  t = unfold(grid(transformer(t)), 3×3, stride 2), twice
    x = [class token; project(t)] + P
    x = x + attention(norm(x));  x = x + mlp(norm(x))          depth times
    logits = head(norm(x) of the class token)

P are the stored positions; training does not change P. unfold collects neighbourhoods in the order (channel, row,
column). grid arranges the tokens as a square lattice.
Source: the paper "Beyond Self-attention: External Attention using Two Linear Layers for Visual Tasks", and its code for
classification, T2T-ViT with external attention.

External attention: the tokens attend to a trained memory of S slots in place of each other.

    A[n, s] = exp(L[n, s]) / Σ_m exp(L[m, s])         softmax over the n tokens, for each slot
    W[n, s] = A[n, s] / (1e-9 + Σ_t A[n, t])          division by the sum over the slots (L1 norm)

    blocks            L = M₀ y + l₀,  out = proj(concat of the heads of M₁ W + m₁),  y = the heads of trans_dims(x)
    token transformer L = M₀ y,       out = y + proj(M₁ W + m₁),                     y = q_linear(norm(t))

All heads of a block share the memories M₀ (S, d) and M₁ (d, S), where d is the head dim. Every sum over the tokens
includes all tokens of an image, so padding with additional tokens would change the logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.families.eanet import EANetSpec
from gmmvit_deploy.models.families.family import Mistake
from gmmvit_deploy.models.layers.blocks import Mlp, PreNormBlock, layer_norm
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.layers.patches import Unfold
from gmmvit_deploy.models.layers.positions import sinusoidal_positions
from gmmvit_deploy.models.layers.roles import with_role

_SIDE = 3
_PATCH = _SIDE**2
_FIRST_SIDE = 7
_FIRST_PATCH = _FIRST_SIDE**2
SLOT_SUM_EPS = 1e-9
"""The number that the released code adds to the sum over the slots.  In float16 this number is 0."""


class SlotWeights(nn.Module):
    """Softmax over the tokens, then division by the sum over the S slots of each head.

    Both operations have roles that compute in float32 in every precision: in float16, 1e-9 becomes 0, and a token
    whose S weights all underflow would be 0/0.
    """

    operator_roles: ClassVar[Mapping[str, Role]] = {"softmax": "softmax", "sum": "norm", "add": "norm", "div": "norm"}

    eps: Tensor

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.slots = slots
        # The exporter drops the addition of a scalar below 1e-8, and a token whose weights all underflow would be 0/0
        # in the graph. The exporter keeps the addition of a vector.
        self.register_buffer("eps", torch.full((1,), SLOT_SUM_EPS), persistent=False)

    def forward(
        self, logits: Float[Tensor, "batch n heads_slots"], *, first: bool = False
    ) -> Float[Tensor, "batch given heads_slots"]:
        """Return the weights W of all tokens, or only of the first token."""
        weights = torch.softmax(logits, dim=1)
        if first:
            weights = weights[:, :1]
        by_head = weights.unflatten(-1, (-1, self.slots))
        divided: Tensor = by_head / (self.eps + by_head.sum(dim=-1, keepdim=True))
        return divided.flatten(-2)


class ExternalAttention(nn.Module):
    """Multi-head external attention as trained.

    project: trans_dims.  to_slots, from_slots: the memories M₀ with l₀, and M₁ with m₁, shared by all heads.
    """

    memories: ClassVar[tuple[str, ...]] = ("to_slots", "from_slots")

    def __init__(self, *, dim: int, heads: int, head_dim: int, slots: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = with_role(nn.Linear(dim, heads * head_dim), "projection")
        self.to_slots = with_role(nn.Linear(head_dim, slots), "projection")
        self.weights = SlotWeights(slots)
        self.from_slots = with_role(nn.Linear(slots, head_dim), "projection")
        self.out = with_role(nn.Linear(heads * head_dim, dim), "projection")

    def forward(self, x: Float[Tensor, "batch n dim"], *, first: bool = False) -> Float[Tensor, "batch given dim"]:
        logits: Tensor = self.to_slots(self.project(x).unflatten(-1, (self.heads, -1)))
        weights: Tensor = self.weights(logits.flatten(-2), first=first)
        out: Tensor = self.out(self.from_slots(weights.unflatten(-1, (self.heads, -1))).flatten(-2))
        return out


class MergedExternalAttention(nn.Module):
    """`ExternalAttention` whose memories are merged with their neighbours.

    to_slots: (heads · S, dim), without bias.  out: (dim, heads · S).
    """

    def __init__(self, *, dim: int, heads: int, slots: int) -> None:
        super().__init__()
        self.to_slots = with_role(nn.Linear(dim, heads * slots, bias=False), "projection")
        self.weights = SlotWeights(slots)
        self.out = with_role(nn.Linear(heads * slots, dim), "projection")

    def forward(self, x: Float[Tensor, "batch n dim"], *, first: bool = False) -> Float[Tensor, "batch given dim"]:
        out: Tensor = self.out(self.weights(self.to_slots(x), first=first))
        return out


class ExternalBlock(PreNormBlock):
    """Pre-norm transformer block with external attention.

    If the block gives only the first token, the softmax still runs over all tokens.
    """

    attention: ExternalAttention | MergedExternalAttention

    def forward(self, x: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch given dim"]:
        if self.gives != "first":
            return super().forward(x)
        return self.with_mlp(x[:, :1] + self.attention(self.attention_norm(x), first=True))


class TokenTransformer(nn.Module):
    """Single-head external attention to the width ``dim``, then an mlp.  The skip connection starts at y."""

    memories: ClassVar[tuple[str, ...]] = ("to_slots", "from_slots")
    operator_roles: ClassVar[Mapping[str, Role]] = {"add": "residual"}

    from_slots: nn.Module

    def __init__(self, *, width: int, dim: int, slots: int) -> None:
        super().__init__()
        self.attention_norm = layer_norm(width)
        self.project = with_role(nn.Linear(width, dim), "projection")
        self.to_slots = with_role(nn.Linear(dim, slots, bias=False), "projection")
        self.weights = SlotWeights(slots)
        self.from_slots = with_role(nn.Linear(slots, dim), "projection")
        self.out = with_role(nn.Linear(dim, dim), "projection")
        self.mlp_norm = layer_norm(dim)
        self.mlp = Mlp(dim, dim)

    def forward(self, x: Float[Tensor, "batch n width"]) -> Float[Tensor, "batch n dim"]:
        y = self.project(self.attention_norm(x))
        x = y + self.out(self.from_slots(self.weights(self.to_slots(y))))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class ClassTokenFirst(nn.Module):
    """[class token; x] + P, as trained."""

    operator_roles: ClassVar[Mapping[str, Role]] = {"add": "bias"}

    position_embedding: Tensor

    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.register_buffer("position_embedding", sinusoidal_positions(tokens, dim))

    def forward(self, x: Float[Tensor, "batch patches dim"]) -> Float[Tensor, "batch n dim"]:
        return torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1) + self.position_embedding


class ClassRowFirst(nn.Module):
    """[row; x + P], where row is the class token plus its position, and P are the other positions."""

    operator_roles: ClassVar[Mapping[str, Role]] = {"add": "bias"}

    row: Tensor
    positions: Tensor

    def __init__(self, row: Float[Tensor, "1 1 dim"], positions: Float[Tensor, "1 patches dim"]) -> None:
        super().__init__()
        self.register_buffer("row", row)
        self.register_buffer("positions", positions)

    def forward(self, x: Float[Tensor, "batch patches dim"]) -> Float[Tensor, "batch n dim"]:
        return torch.cat([self.row.expand(x.shape[0], -1, -1), x + self.positions], dim=1)


class EANet(Model):
    """Classifier with external attention."""

    unfolded_patches: ClassVar[tuple[str, int]] = ("token_transformers.0.project", _FIRST_SIDE)

    spec: EANetSpec
    positions: ClassTokenFirst | ClassRowFirst

    def __init__(self, spec: EANetSpec) -> None:
        super().__init__()
        self.spec = spec
        self.unfolds = nn.ModuleList(
            [Unfold(_FIRST_SIDE, stride=4, padding=2), *(Unfold(_SIDE, stride=2, padding=1) for _ in range(2))]
        )
        self.token_transformers = nn.ModuleList(
            TokenTransformer(width=width, dim=spec.token_dim, slots=spec.token_slots)
            for width in (_FIRST_PATCH * spec.channels, _PATCH * spec.token_dim)
        )
        self.project = with_role(nn.Linear(_PATCH * spec.token_dim, spec.dim), "projection")
        self.positions = ClassTokenFirst(spec.tokens, spec.dim)
        self.blocks = nn.ModuleList(
            ExternalBlock(
                dim=spec.dim,
                mlp_dim=spec.mlp_dim,
                attention=ExternalAttention(
                    dim=spec.dim, heads=spec.heads * spec.expansion, head_dim=spec.head_dim, slots=spec.slots
                ),
            )
            for _ in range(spec.depth)
        )
        self.norm = layer_norm(spec.dim)
        self.head = with_role(nn.Linear(spec.dim, spec.classes), "head")

    @property
    def unfolded_channels(self) -> tuple[int, ...]:
        return self.spec.channels, self.spec.token_dim, self.spec.token_dim

    def logits_and_features(
        self, images: Float[Tensor, "batch channels side side"]
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch dim"]]:
        x = self.unfolds[0](images)
        for unfold, transformer, grid in zip(self.unfolds[1:], self.token_transformers, self.spec.grids, strict=False):
            x = unfold(transformer(x).transpose(1, 2).unflatten(-1, (grid, grid)))
        x = self.positions(self.project(x))
        for block in self.blocks:
            x = block(x)
        features: Tensor = self.norm(x[:, 0])
        return self.head(features), features


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
