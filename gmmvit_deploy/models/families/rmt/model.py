"""RMT: a convolution stem, stages of blocks with Manhattan attention on a grid of tokens, and a head.

block:  x = x + pos(x)                       pos: 3×3 depthwise convolution
        x = x + γ₁ · attention(norm(x))      γ₁, γ₂: LayerScale, a learned factor for each feature, where present
        x = x + γ₂ · mlp(norm(x))
mlp:    second(y + conv(y)) with y = GELU(first(x)); the release of 2023 has no convolution (conv = 0)
end:    2023: head(mean(BatchNorm(x)));  2024: head(mean(swish(BatchNorm(project(x)))))
        token_label: as 2024, plus half of the maximum over all positions of token_head(x)

A grid has the shape (B, h, w, D): B images, h × w tokens, D features. Stem and downsampling output (B, D, h, w), the
layout of convolutions, which the first operator of the next block, a convolution, reads as well.
Source: "RMT: Retentive Networks Meet Vision Transformers" (arXiv 2309.11523) and its authors' code.

Attention, on the whole grid of tokens, or decomposed into rows and columns:

whole:       A = softmax(Q Kᵀ · d^(−1/2) + decay_h · (|Δrow| + |Δcolumn|))                      O = A V
decomposed:  A_w = softmax(Q Kᵀ · d^(−1/2) + decay_h · |Δcolumn|) within each row of the grid
             A_h = softmax(Q Kᵀ · d^(−1/2) + decay_h · |Δrow|) within each column of the grid   O = A_h (A_w V)
both:        the output is out(O + local(V)), where ``local`` is a 5×5 depthwise convolution

d: the head dim.  n = h·w: the number of tokens of a grid.  Two softmaxes are not the same as a single softmax, so whole
and decomposed attention are different networks, although the sum of both decays along an axis is the decay on the grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gmmvit_deploy.inference.precision import Role
from gmmvit_deploy.models.families.family import Mistake
from gmmvit_deploy.models.families.rmt import RMTSpec
from gmmvit_deploy.models.layers.attention import heads_of, projected
from gmmvit_deploy.models.layers.blocks import BatchNorm, with_other_epsilon
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.layers.roles import with_role
from gmmvit_deploy.models.scores.attention import AttentionScores
from gmmvit_deploy.models.scores.biases import ManhattanDecay, retention_decays
from gmmvit_deploy.models.scores.scales import Scale
from gmmvit_deploy.models.scores.step import Grid, rows_and_columns
from gmmvit_deploy.models.specs import MEAN_OF_TOKENS

_LOCAL_KERNEL = 5
_LAYER_NORM_EPS = 1e-6
_AUXILIARY_WEIGHT = 0.5  # of the logits of the token head; the paper authors' code evaluates with this weight


class NormedConvolution(nn.Module):
    """A 3×3 convolution with padding 1, then BatchNorm, which is None after folding.

    forward: (B, channels, height, width) → (B, D, ⌈height/stride⌉, ⌈width/stride⌉).
    """

    def __init__(self, channels: int, dim: int, *, stride: int, role: Role) -> None:
        super().__init__()
        self.convolution = with_role(nn.Conv2d(channels, dim, 3, stride=stride, padding=1), role)
        self.norm: BatchNorm | None = BatchNorm(dim)

    def forward(self, lattice: Tensor) -> Tensor:
        out: Tensor = self.convolution(lattice)
        return out if self.norm is None else self.norm(out)


class NormedLinear(nn.Module):
    """A linear layer, then BatchNorm over its outputs, which is None after folding."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.linear = with_role(nn.Linear(dim, out), "projection")
        self.norm: BatchNorm | None = BatchNorm(out)

    def forward(self, x: Float[Tensor, "batch h w dim"]) -> Float[Tensor, "batch h w out"]:
        out: Tensor = self.linear(x)
        return out if self.norm is None else self.norm(out.movedim(-1, 1)).movedim(1, -1)


class GridConvolution(nn.Module):
    """A depthwise convolution on a grid of tokens, which keeps its size.  adds_input: x + convolution(x)."""

    operator_roles: ClassVar[Mapping[str, Role]] = {"add": "residual"}

    def __init__(self, dim: int, kernel: int, *, adds_input: bool) -> None:
        super().__init__()
        self.adds_input = adds_input
        self.convolution = with_role(nn.Conv2d(dim, dim, kernel, padding=kernel // 2, groups=dim), "depthwise")

    def forward(self, x: Float[Tensor, "batch h w dim"]) -> Float[Tensor, "batch h w dim"]:
        out: Tensor = self.convolution(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return x + out if self.adds_input else out


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

    rotation: a module of the stage that rotates Q and K by the position of the token, or None.
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
        return (self.tokens,)

    def token_shape(self) -> tuple[int, ...]:
        """Return the dimensions of the tokens in Q, K and V: (n,) or (h, w)."""
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
    """

    joined = False

    def _add_attentions(self, heads: int, head_dim: int) -> None:
        height, width = self.grid
        self.rows = TokenAttention(heads, head_dim, (1, width))
        self.columns = TokenAttention(heads, head_dim, (1, height))

    def attentions(self) -> tuple[TokenAttention, ...]:
        return self.rows, self.columns

    def token_shape(self) -> tuple[int, ...]:
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


class Stem(nn.Module):
    """Four 3×3 convolutions with BatchNorm, and GELU between them: images (B, c, S, S) → (B, D, ⌈S/4⌉, ⌈S/4⌉)."""

    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        half = dim // 2
        self.convolutions = nn.ModuleList(
            NormedConvolution(before, after, stride=stride, role="embedding" if index == 0 else "projection")
            for index, (before, after, stride) in enumerate(
                ((channels, half, 2), (half, half, 1), (half, dim, 2), (dim, dim, 1))
            )
        )
        self.gelu = nn.GELU()

    def forward(self, images: Float[Tensor, "batch channels side side"]) -> Float[Tensor, "batch dim h w"]:
        first, *others = self.convolutions
        x: Tensor = first(images)
        for convolution in others:
            x = convolution(self.gelu(x))
        return x


class LayerScale(nn.Module):
    """Multiply each feature by a learned factor γ.  Folding merges γ into the linear layer before it."""

    role: Role = "scale"

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(1e-6 * torch.ones(dim))

    def forward(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        return self.gamma * x


class RMTMlp(nn.Module):
    """Linear layer, GELU, in the releases since 2024 x + depthwise convolution of x, and a second linear layer."""

    def __init__(self, dim: int, hidden_dim: int, *, convolves: bool) -> None:
        super().__init__()
        self.first = with_role(nn.Linear(dim, hidden_dim), "projection")
        self.gelu = nn.GELU()
        self.convolution = GridConvolution(hidden_dim, 3, adds_input=True) if convolves else None
        self.second = with_role(nn.Linear(hidden_dim, dim), "projection")

    def forward(self, x: Float[Tensor, "batch h w dim"]) -> Float[Tensor, "batch h w dim"]:
        hidden = self.gelu(self.first(x))
        if self.convolution is not None:
            hidden = self.convolution(hidden)
        out: Tensor = self.second(hidden)
        return out


class RMTBlock(nn.Module):
    """A block of a stage, as in the formulas of this module.

    attention_scale, mlp_scale: γ₁ and γ₂, or None in a block without LayerScale and after folding.
    """

    operator_roles: ClassVar[Mapping[str, Role]] = {"add": "residual"}

    def __init__(self, spec: RMTSpec, stage: int) -> None:
        super().__init__()
        dim, scaled = spec.dims[stage], stage + 1 in spec.layer_scale
        attention = DecomposedAttention if stage + 1 in spec.decomposed_stages else ManhattanAttention
        self.position = GridConvolution(dim, 3, adds_input=True)
        self.attention_norm = nn.LayerNorm(dim, eps=_LAYER_NORM_EPS)
        self.attention = attention(dim, spec.heads[stage], spec.grids[stage])
        self.attention_scale = LayerScale(dim) if scaled else None
        self.mlp_norm = nn.LayerNorm(dim, eps=_LAYER_NORM_EPS)
        self.mlp = RMTMlp(dim, spec.mlp_dims[stage], convolves=spec.release != "2023")
        self.mlp_scale = LayerScale(dim) if scaled else None

    def forward(self, x: Float[Tensor, "batch h w dim"], rotation: nn.Module | None) -> Float[Tensor, "batch h w dim"]:
        x = self.position(x)
        attended = self.attention(self.attention_norm(x), rotation)
        x = x + (attended if self.attention_scale is None else self.attention_scale(attended))
        out: Tensor = self.mlp(self.mlp_norm(x))
        return x + (out if self.mlp_scale is None else self.mlp_scale(out))


class Downsampling(nn.Module):
    """A 3×3 convolution of stride 2 with BatchNorm: (B, h, w, D) → (B, D', ⌈h/2⌉, ⌈w/2⌉)."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.reduction = NormedConvolution(dim, out, stride=2, role="projection")

    def forward(self, x: Float[Tensor, "batch h w dim"]) -> Float[Tensor, "batch out half_h half_w"]:
        out: Tensor = self.reduction(x.permute(0, 3, 1, 2))
        return out


class Stage(nn.Module):
    """Blocks on the same grid of tokens, then a convolution of stride 2 unless the stage is the last stage.

    forward: (B, D, h, w) → (B, D', ⌈h/2⌉, ⌈w/2⌉), or (B, h, w, D) in the last stage.
    rotation: the rotary position embedding of Q and K in all blocks; None in the release of 2023.
    """

    rotation: nn.Module | None

    def __init__(self, spec: RMTSpec, stage: int) -> None:
        super().__init__()
        blocks = [RMTBlock(spec, stage) for _ in range(spec.depths[stage])]
        head_dim, shape = spec.dims[stage] // spec.heads[stage], blocks[0].attention.token_shape()
        self.rotation = PairRotation(head_dim, shape) if spec.rotates else None
        self.blocks = nn.ModuleList(blocks)
        last = stage == len(spec.depths) - 1
        self.downsampling = None if last else Downsampling(spec.dims[stage], spec.dims[stage + 1])

    def forward(self, lattice: Float[Tensor, "batch dim h w"]) -> Tensor:
        x = lattice.permute(0, 2, 3, 1)
        for block in self.blocks:
            x = block(x, self.rotation)
        return x if self.downsampling is None else self.downsampling(x)


class Projection(nn.Module):
    """A linear layer with BatchNorm, then swish: y · σ(y).  (B, h, w, D) → (B, h, w, P)."""

    operator_roles: ClassVar[Mapping[str, Role]] = {"sigmoid": "activation", "mul": "activation"}

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.normed = NormedLinear(dim, out)

    def forward(self, x: Float[Tensor, "batch h w dim"]) -> Float[Tensor, "batch h w out"]:
        y: Tensor = self.normed(x)
        return y * torch.sigmoid(y)


class RMT(Model):
    """RMT of any release.

    norm: the BatchNorm before the head of the release of 2023; None in the other releases, and after folding.
    token_head: the head on every position in the release with token labels, otherwise None.
    """

    operator_roles: ClassVar[Mapping[str, Role]] = {
        "mean": "pooling",
        "amax": "pooling",
        "mul": "scale",
        "add": "head",
    }

    spec: RMTSpec

    def __init__(self, spec: RMTSpec) -> None:
        super().__init__()
        self.spec = spec
        width = spec.dims[-1]
        self.stem = Stem(spec.channels, spec.dims[0])
        self.stages = nn.ModuleList(Stage(spec, stage) for stage in range(len(spec.depths)))
        self.projection = Projection(width, spec.projection_dim) if spec.projection_dim else None
        self.norm: BatchNorm | None = None if spec.projection_dim else BatchNorm(width)
        self.head = with_role(nn.Linear(spec.projection_dim or width, spec.classes), "head")
        tokens = spec.release == "token_label"
        self.token_head = with_role(nn.Linear(width, spec.classes), "head") if tokens else None
        self.token_weight = _AUXILIARY_WEIGHT

    @property
    def pooling(self) -> str:
        return MEAN_OF_TOKENS

    def logits_and_features(
        self, images: Float[Tensor, "batch channels side side"]
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch dim"]]:
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x)
        y = x if self.projection is None else self.projection(x)
        if self.norm is not None:
            y = self.norm(y.movedim(-1, 1)).movedim(1, -1)
        features: Tensor = y.mean(dim=(1, 2))
        logits: Tensor = self.head(features)
        if self.token_head is None:
            return logits, features
        largest: Tensor = self.token_head(x).amax(dim=(1, 2))
        return logits + (largest if self.token_weight == 1 else self.token_weight * largest), features


# ---- usual mistakes; those with the decay are in `scores.biases.ManhattanDecay` ----


def _left_out(stage: Stage, rotation: PairRotation) -> None:
    stage.rotation = None


def _of_halves(stage: Stage, rotation: PairRotation) -> None:
    cos, sin = rotation.tables()
    heads, half = _heads(stage), sin.shape[-1] // 2
    sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
    cos, sin = (torch.cat([table] * heads, dim=-1) for table in (cos, sin))
    stage.rotation = FoldedRotation(cos, sin, head_dim=2 * half)


def _columns_first(stage: Stage, rotation: PairRotation) -> None:
    rows, columns = _first_attention(stage).grid
    by_column = rotation.positions.reshape(columns, rows).t()
    rotation.positions = by_column.reshape(rotation.positions.shape)


def _other_release(model: Model) -> bool:
    return _rotated_by_formula(model) or _without_parts_of_2024(model)


def _without_parts_of_2024(model: Model) -> bool:
    changed = _with_rotations(model, _left_out)
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
    ("rotary position embedding left out", lambda model: _with_rotations(model, _left_out)),
    (
        "rotary position embedding of halves of a head in place of pairs",
        lambda model: _with_rotations(model, _of_halves),
    ),
    (
        "rotary position embedding with positions counted column by column",
        lambda model: _with_rotations(model, _columns_first),
    ),
    ("the network of another release: 2023 for 2024, or 2024 for 2023", _other_release),
    ("BatchNorm with an epsilon of 1e-3", with_other_epsilon),
)
