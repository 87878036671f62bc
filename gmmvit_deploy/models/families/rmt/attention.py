"""Attention of an RMT: on the whole grid of tokens, or decomposed into rows and columns.

whole:       A = softmax(Q Kᵀ · d^(−1/2) + decay_h · (|Δrow| + |Δcolumn|))                      O = A V
decomposed:  A_w = softmax(Q Kᵀ · d^(−1/2) + decay_h · |Δcolumn|) within each row of the grid
             A_h = softmax(Q Kᵀ · d^(−1/2) + decay_h · |Δrow|) within each column of the grid   O = A_h (A_w V)
both:        the output is out(O + local(V)), where ``local`` is a 5×5 depthwise convolution

d: the head dim.  n = h·w: the number of tokens of a grid of h × w tokens.  Two softmaxes are not the same as a single
softmax, so whole and decomposed attention are different networks, although the sum of both decays along an axis is the
decay on the grid.
Source: Manhattan self-attention of "RMT: Retentive Networks Meet Vision Transformers".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.models.families.rmt.convolutions import GridConvolution
from gmmvit_deploy.models.layers.attention import heads_of, projected
from gmmvit_deploy.models.layers.roles import with_role
from gmmvit_deploy.models.scores.attention import AttentionScores
from gmmvit_deploy.models.scores.biases import ManhattanDecay, retention_decays
from gmmvit_deploy.models.scores.grids import Grid, rows_and_columns
from gmmvit_deploy.models.scores.scales import Scale
from gmmvit_deploy.precision import Role

__all__ = ["DecomposedAttention", "FoldedRotation", "ManhattanAttention", "PairRotation", "TokenAttention"]

_LOCAL_KERNEL = 5


class TokenAttention(nn.Module):
    """Attention between the tokens of a sequence: softmax(Q Kᵀ · d^(−1/2) + decay) V, by head.

    grid: (rows, columns) of the tokens, for the distances of the decay; (1, n) for tokens in a row.
    forward: Q, K and V (B, …, n, H·d) → (B, …, n, H·d); "…" is the number of sequences of an image, or nothing.
    """

    operator_roles: ClassVar[Mapping[str, Role]] = {"softmax": "softmax", "matmul": "product"}

    def __init__(self, heads: int, head_dim: int, grid: Grid) -> None:
        super().__init__()
        self.heads = heads
        self.scores = AttentionScores(
            {"scale": Scale(head_dim**-0.5), "decay": ManhattanDecay(retention_decays(heads), grid)}
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (heads_of(part, self.heads) for part in (query, key, value))
        mixed: Tensor = self.scores.weights(query, key) @ value
        return mixed.transpose(-3, -2).flatten(-2)


class PairRotation(nn.Module):
    """Rotary position embedding: rotate each pair of features (2i, 2i+1) of Q or K by the angle position · angle[2i].

        x' = x ∘ cos(l · angle) + turned(x) ∘ sin(l · angle),    turned: (x_0, x_1, …) → (−x_1, x_0, …)

    l: the number of the token on the grid, counted row by row.  angle: (d), stored in the checkpoint, where both
    features of a pair have the same angle. All heads have the same angles.
    The tables are computed in the data type of ``angle``: in float32 the tables equal those of the paper authors' code.
    shape: the dimensions of the tokens in x: (n,) or (h, w).
    forward: (B, …, H·d) → (B, …, H·d), with ``shape`` in place of "…".
    """

    angle: Tensor
    positions: Tensor

    def __init__(self, head_dim: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        rates = 10000.0 ** -torch.linspace(0, 1, head_dim // 2)
        self.register_buffer("angle", rates.repeat_interleave(2))
        positions = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
        self.register_buffer("positions", positions, persistent=False)

    def tables(self) -> tuple[Float[Tensor, "*tokens d"], Float[Tensor, "*tokens d"]]:
        """Return (cos, sin) of the angle of each token and feature."""
        angles = self.positions[..., None] * self.angle
        return angles.cos(), angles.sin()

    def forward(self, x: Float[Tensor, "batch *tokens inner"]) -> Float[Tensor, "batch *tokens inner"]:
        cos, sin = (table[..., None, :] for table in self.tables())
        heads = x.unflatten(-1, (-1, self.angle.numel()))
        turned = torch.stack((-heads[..., 1::2], heads[..., ::2]), dim=-1).flatten(-2)
        rotated: Tensor = heads * cos + turned * sin
        return rotated.flatten(-2)


class FoldedRotation(nn.Module):
    """`PairRotation` with stored tables, for features in the order 0, 2, …, d−2, 1, 3, …, d−1 within each head.

        x' = x ∘ cos + swapped(x) ∘ sin,    swapped: the second half of each head before the first half

    cos, sin: (…, H·d), the tables of a head repeated for each head; the first half of each head in ``sin`` has the
    opposite sign, which replaces the negation in ``turned``. −a · b and a · (−b) are equal bit for bit.
    """

    operator_roles: ClassVar[Mapping[str, Role]] = {"mul": "rotation", "add": "rotation"}
    cos: Tensor
    sin: Tensor

    def __init__(
        self, cos: Float[Tensor, "*tokens inner"], sin: Float[Tensor, "*tokens inner"], *, head_dim: int
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Float[Tensor, "batch *tokens inner"]) -> Float[Tensor, "batch *tokens inner"]:
        first, second = x.unflatten(-1, (-1, 2, self.head_dim // 2)).chunk(2, dim=-2)
        swapped = torch.cat((second, first), dim=-2).flatten(-3)
        return x * self.cos + swapped * self.sin


class ManhattanAttention(nn.Module):
    """Attention of every token of a grid to all tokens of the grid.

    forward: (B, h, w, D) → (B, h, w, D).  rotation: a module that rotates Q and K by the position of the token, or
    None. All attentions of a stage have the same rotation, so the stage owns the module.
    """

    stacked_projection: ClassVar[tuple[str, int]] = ("qkv", 3)
    operator_roles: ClassVar[Mapping[str, Role]] = {"add": "residual"}
    qkv: nn.Module

    def __init__(self, dim: int, heads: int, grid: Grid) -> None:
        super().__init__()
        self.grid = rows_and_columns(grid)
        self.qkv = with_role(nn.Linear(dim, 3 * dim), "projection")
        self.local = GridConvolution(dim, _LOCAL_KERNEL, adds_input=False)
        self.out = with_role(nn.Linear(dim, dim), "projection")
        self._add_attentions(heads, dim // heads)

    def _add_attentions(self, heads: int, head_dim: int) -> None:
        self.tokens = TokenAttention(heads, head_dim, self.grid)

    def attentions(self) -> tuple[TokenAttention, ...]:
        """Return the attentions between tokens, in the order in which they run."""
        return (self.tokens,)

    def token_shape(self) -> tuple[int, ...]:
        """Return the dimensions of the tokens in Q, K and V: (n,)."""
        return (math.prod(self.grid),)

    def forward(self, x: Float[Tensor, "batch h w dim"], rotation: nn.Module | None) -> Float[Tensor, "batch h w dim"]:
        # Q, K and V have the shape from which the heads are split, so that our CPU kernel reads them without a copy.
        query, key, value = projected(self.qkv, x.flatten(1, 2), 3)
        if rotation is not None:
            query, key = rotation(query), rotation(key)
        local = self.local(value.unflatten(1, self.grid)).flatten(1, 2)
        out: Tensor = self.out(self.tokens(query, key, value) + local).unflatten(1, self.grid)
        return out


class DecomposedAttention(ManhattanAttention):
    """Attention within each row of a grid, then, with the same Q and K, within each column.

    joined: True after `folding.join_rows`, which moves rows and columns into the batch.
    forward: (B, h, w, D) → (B, h, w, D).
    """

    joined = False

    def _add_attentions(self, heads: int, head_dim: int) -> None:
        height, width = self.grid
        self.rows = TokenAttention(heads, head_dim, (1, width))
        self.columns = TokenAttention(heads, head_dim, (1, height))

    def attentions(self) -> tuple[TokenAttention, ...]:
        return self.rows, self.columns

    def token_shape(self) -> tuple[int, ...]:
        """Return the dimensions of the tokens in Q, K and V: (h, w)."""
        return self.grid

    def forward(self, x: Float[Tensor, "batch h w dim"], rotation: nn.Module | None) -> Float[Tensor, "batch h w dim"]:
        query, key, value = projected(self.qkv, x, 3)
        if rotation is not None:
            query, key = rotation(query), rotation(key)
        mixed = self._within(self.rows, query, key, value)
        mixed = self._within(self.columns, *(part.transpose(1, 2) for part in (query, key, mixed)))
        out: Tensor = self.out(mixed.transpose(1, 2) + self.local(value))
        return out

    def _within(
        self, attention: TokenAttention, query: Tensor, key: Tensor, value: Tensor
    ) -> Float[Tensor, "batch sequences n dim"]:
        """Attend within each sequence, for Q, K and V of shape (B, sequences, n, D)."""
        if not self.joined:
            return attention(query, key, value)  # type: ignore[no-any-return]
        joined = attention(*(part.flatten(0, 1) for part in (query, key, value)))
        mixed: Tensor = joined.unflatten(0, (-1, query.shape[1]))
        return mixed
