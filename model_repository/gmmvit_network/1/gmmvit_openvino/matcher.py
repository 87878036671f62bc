"""Find the attentions in a graph that this project's kernel computes.

    O = after(softmax(before((Q Kᵀ) ∘ M + B))) V

    Q               (batch, …, heads, q, head_dim), with q query tokens; "…" is the dimension of windows, or nothing
    K, V            (batch, …, heads, n, head_dim), with n tokens; q = n, or q = 1 in class attention
    M               the mask, (heads, q, n) or (q, n) for all heads, or a number that scales the scores;
                    ∘ is the elementwise multiplication
    B               the bias, (…, heads, q, n) or (q, n) for all heads, or absent
    before, after   head mixing: each multiplies the heads by a (heads, heads) matrix; ``before`` needs ``after``

In the graph, Split, Reshape and Transpose cut the last dimension ("columns") of a tensor (batch, …, n, columns) into
Q, K and V. Q may be cut from another tensor than K and V. A Transpose and a Reshape merge the heads of O. In the graphs
of Swin for engines, a further Reshape joins windows and heads into a single dimension, and the mask and the bias have
an entry for each window and head. CPUs run such a graph if an earlier version converted the bundle to int8. The matcher
refuses every other attention, with the reason.

The matcher reads a graph through the interface `GraphView` of `graph_view.py`. ``gmmvit repository`` copies this file
into the folder of a served model, so this file imports only modules that are copied with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

# Relative imports also work in the folder of a served model, where the package has another name.
from .prepared_masks import takes_bias
from .refusal_reasons import change_after_split, unknown_step

if TYPE_CHECKING:
    from gmmvit_deploy.runtimes.kernels.graph_view import (
        GraphView,  # not copied with this file: only type checkers read it
    )

__all__ = ["MatchedAttention", "Part", "Refusal", "attentions_in", "summary_of"]

_MOST_MIXED = 16
"""The maximum number of heads for head mixing in the kernel."""
# Permutations of the Transposes: element 0 is without a dimension of windows W, element 1 is with it.
_HEADS_APART = [0, 2, 1, 3], [0, 1, 3, 2, 4]
"""(B, n, H, d) → (B, H, n, d), and (B, W, n, H, d) → (B, W, H, n, d).  Each permutation is its own inverse."""
_KEYS_ACROSS = [0, 2, 3, 1], [0, 1, 3, 4, 2]
"""(B, n, H, d) → (B, H, d, n), and (B, W, n, H, d) → (B, W, H, d, n)."""
_BIAS_AND_MIXING = "it has both a bias and head mixing, which the kernel does not combine"
_NOT_MERGED = "its heads are not merged by a Transpose and a Reshape"
_NOT_OVER_KEYS = "its softmax does not run over the keys, the last dimension"


@dataclass(frozen=True, eq=False)
class Part:
    """Q, K or V: a range of the last dimension of a tensor.

    A Reshape turns the range into (B, …, n, heads, head_dim), the input of the Transpose.

    source: the tensor, (B, …, n, columns).  column: the first index of the range in the last dimension.
    rows: the dimensions (…, n), without the batch; n is the number of tokens.
    joined: whether a Reshape then joins the dimension of windows and that of heads.
    """

    source: Any
    column: int
    rows: tuple[int, ...]
    heads: int
    head_dim: int
    joined: bool


@dataclass(frozen=True, eq=False)
class MatchedAttention:
    """An attention that the kernel computes.

    name: the name of the attention's module.  parts: Q, K and V, with equal windows, heads and head_dim; K and V have
    equal rows.
    mask: the mask (heads, queries, tokens), (1, queries, tokens) for a mask of all heads, or None without a mask.
    scale: the number that multiplies the scores. If there is a mask, scale is 1, because the mask includes the scale.
    bias: the bias with the shape that it has in the graph, or None without a bias.
    mixing: the head mixing matrices (before or None, after), each indexed [from head, to head]; () without head mixing.
    last: the value of the attention's output, (B, …, n, heads · head_dim).
    """

    name: str
    parts: tuple[Part, Part, Part]
    mask: Any
    scale: float
    bias: Any
    mixing: tuple[Any, ...]
    last: Any

    @property
    def heads(self) -> int:
        return self.parts[0].heads

    @property
    def head_dim(self) -> int:
        return self.parts[0].head_dim

    @property
    def queries(self) -> int:
        """The number of query tokens."""
        return self.parts[0].rows[-1]

    @property
    def tokens(self) -> int:
        """The number of key tokens."""
        return self.parts[1].rows[-1]

    @property
    def windows(self) -> tuple[int, ...]:
        """The dimensions of the scores between batch and heads: (number of windows,), or () without windows."""
        return self.parts[0].rows[:-1]


@dataclass(frozen=True)
class Refusal:
    """An attention that the kernel does not compute.

    name: the name of the attention's module.  reason: a clause for messages, such as "it mixes 20
    heads, expected at most 16".
    """

    name: str
    reason: str


class _RefusedError(Exception):
    pass


def attentions_in(view: GraphView) -> list[MatchedAttention | Refusal]:
    """Return for each softmax of a graph, in the graph's order, the attention around the softmax or a refusal."""
    return [_attention_of(softmax, view) for softmax in view.softmaxes()]


def summary_of(matches: Sequence[MatchedAttention | Refusal]) -> str:
    """Return for example ``3 of 4; not: blocks.3.attention (it mixes 20 heads, expected at most 16)``."""
    by_reason: dict[str, list[str]] = {}
    for match in matches:
        if isinstance(match, Refusal):
            by_reason.setdefault(match.reason, []).append(match.name)
    taken = len(matches) - sum(map(len, by_reason.values()))
    refused = [f"{', '.join(names)} ({reason})" for reason, names in by_reason.items()]
    return f"{taken} of {len(matches)}" + (f"; not: {'; '.join(refused)}" if refused else "")


def _attention_of(softmax: Any, view: GraphView) -> MatchedAttention | Refusal:
    full = view.name(softmax)
    name = full.rpartition("/")[0] or full
    try:
        return _matched(softmax, name, view)
    except _RefusedError as exc:
        return Refusal(name, str(exc))


def _refuse(reason: str) -> NoReturn:
    raise _RefusedError(reason)


def _matched(softmax: Any, name: str, view: GraphView) -> MatchedAttention:
    if view.axis(softmax) not in (-1, len(view.shape(softmax) or ()) or view.axis(softmax)):
        _refuse(_NOT_OVER_KEYS)
    query, key, factor, bias, before = _scores(softmax, view)
    value, parted, last, after = _output(softmax, view)
    q = _part(query, "queries", view)
    k = _part(key, "keys", view, across=True)
    v = _part(value, "values", view)
    _require_equal_sizes(q, k, v, view)
    rows, heads, head_dim, queries, n = q.rows, q.heads, q.head_dim, q.rows[-1], k.rows[-1]
    if view.axis(softmax) not in (-1, 3 if q.joined else len(rows) + 2):
        _refuse(_NOT_OVER_KEYS)
    if parted != ((*rows[:-1], heads, queries, head_dim) if q.joined else None):
        _refuse(_NOT_MERGED)
    if q.joined:
        factor, bias = _of_windows(factor, bias, rows[:-1], heads)
    mixing = _mixing(before, after, heads)
    if view.refused_type(last) or view.shape(last) != (*rows, heads * head_dim):
        _refuse(f"its output has shape {_words(view.shape(last))}, expected {_words((*rows, heads * head_dim))}")
    if bias is not None and mixing:
        _refuse(_BIAS_AND_MIXING)
    if bias is not None and not takes_bias(bias.shape, heads, (queries, n), rows[:-1]):
        _refuse(f"its bias has shape {_words(bias.shape)}, expected {_words((*rows[:-1], heads, queries, n))}")
    if factor.size == 1:
        return MatchedAttention(name, (q, k, v), None, float(factor.reshape(())), bias, mixing, last)
    if factor.shape != (queries, n) and not (
        factor.shape[-3:] == (heads, queries, n) and factor.size == heads * queries * n
    ):
        _refuse(f"its mask has shape {_words(factor.shape)}, expected {_words((heads, queries, n))}")
    return MatchedAttention(name, (q, k, v), factor.reshape(-1, queries, n), 1.0, bias, mixing, last)


def _of_windows(factor: Any, bias: Any, windows: tuple[int, ...], heads: int) -> tuple[Any, Any]:
    """Return (the mask, (heads, q, n), the bias, (windows, heads, q, n)) of an attention whose windows are joined.

    The inputs have the shape (windows · heads, q, n), or fewer dimensions if all windows and heads share them.
    """
    joined = math.prod(windows) * heads
    if factor.shape[-3:-2] == (joined,):
        each = factor.reshape(-1, heads, *factor.shape[-2:])
        if (each != each[0]).any():
            _refuse("its windows have different masks, expected the same masks for all windows")
        factor = each[0]
    if bias is not None and bias.shape[-3:-2] == (joined,):
        bias = bias.reshape(-1, heads, *bias.shape[-2:])
    return factor, bias


def _require_equal_sizes(q: Part, k: Part, v: Part, view: GraphView) -> None:
    """Refuse parts of different sizes.  Q may have a single token, or as many tokens as K and V."""
    if q.rows[:-1] == k.rows[:-1] and q.rows[-1] not in (1, k.rows[-1]):
        _refuse(
            f"it has {_count(q.rows[-1], 'query')} and {_count(k.rows[-1], 'key')}, "
            "expected equal numbers or a single query token"
        )
    if len({view.fixed_batch(part.source) for part in (q, k, v)}) > 1:
        _refuse("its queries, keys and values differ in the batch dimension")
    shapes = [(*part.rows, part.heads, part.head_dim) for part in (q, k, v)]
    without_tokens = {(*part.rows[:-1], part.heads, part.head_dim) for part in (q, k, v)}
    if len({part.joined for part in (q, k, v)}) != 1:
        _refuse("a Reshape joins windows and heads of some of its queries, keys and values, but not of all")
    if len(without_tokens) != 1 or k.rows != v.rows:
        _refuse(f"its queries, keys and values differ in shape: {', '.join(map(_words, shapes))}")


def _mixing(before: Any, after: Any, heads: int) -> tuple[Any, ...]:
    if before is None and after is None:
        return ()
    if after is None:
        _refuse("it mixes heads only before its softmax, expected before and after, or only after")
    for matrix in (before, after):
        if matrix is not None and matrix.shape != (heads, heads):
            _refuse(f"its head mixing has shape {_words(matrix.shape)}, expected {_words((heads, heads))}")
    if heads > _MOST_MIXED:
        _refuse(f"it mixes {heads} heads, expected at most {_MOST_MIXED}")
    return before, after


def _scores(softmax: Any, view: GraphView) -> tuple[Any, Any, Any, Any, Any]:
    """Return (Q, Kᵀ, M or the scale, the bias or None, ``before`` or None), which give the input of this softmax."""
    unit = np.ones((), np.float32)
    at, before = view.plain(view.inputs(softmax)[0]), None
    mixed = _unmixed(at, view)
    if mixed is not None:
        before, at = mixed
    bias, at = _constant_and_other(at, "addition", view) or (None, at)
    if bias is not None and _unmixed(view.plain(at), view) is not None:
        _refuse(_BIAS_AND_MIXING)
    factor, at = _constant_and_other(view.plain(at), "multiplication", view) or (unit, at)
    at = view.plain(at)
    if view.kind(at) != "matrix product":
        _refuse(unknown_step(at, "before", view))
    for constant in (factor, bias):
        if constant is not None and not view.takes_constant(constant):
            _refuse(f"its mask, scale or bias is {constant.dtype}, a type that the kernel does not support")
    query, key = map(view.plain, view.inputs(at))
    scale, unscaled = _constant_and_other(query, "multiplication", view) or (unit, query)
    factor = np.asarray(factor, np.float32)
    if scale.size == 1 and view.takes_constant(scale):  # the graph may scale Q instead of the scores
        factor, query = factor * scale.reshape(()), view.plain(unscaled)
    return query, key, factor, bias, before


def _output(softmax: Any, view: GraphView) -> tuple[Any, Any, Any, Any]:
    """Follow the graph after a softmax.

    Returns (V, the shape (W, H, q, d) if a Reshape divides windows and heads again, otherwise None, the output with
    merged heads, the matrix ``after`` or None).
    """
    weights, after = softmax, None
    at = view.reader(weights, through_casts=True)
    if at is not None and view.kind(at) == "reshape":
        product = view.reader(at, through_casts=True)
        back = None if product is None else view.reader(product)
        mixed = None if back is None else _unmixed(back, view)
        if mixed is None:
            _refuse("the Reshape after its softmax does not belong to head mixing")
        after, weights = mixed[0], back
        at = view.reader(weights, through_casts=True)
    if at is None:
        readers = ", ".join(view.readers(weights)) or "no operator"
        _refuse(f"its attention weights are read by {readers}, expected only the matrix product with V")
    if view.kind(at) != "matrix product":
        _refuse(unknown_step(at, "after", view))
    value = view.plain(view.inputs(at)[1])
    transpose, parted, orders = view.reader(at), None, [*_HEADS_APART]
    if transpose is not None and view.kind(transpose) == "reshape":
        parted, orders = view.target(transpose) or (), [_HEADS_APART[1]]
        transpose = view.reader(transpose)
    last = None if transpose is None else view.reader(transpose)
    back_in_order = transpose is not None and view.kind(transpose) == "transpose"
    if not back_in_order or view.order(transpose) not in orders or last is None or view.kind(last) != "reshape":
        _refuse(_NOT_MERGED)
    return value, parted, last, after


def _unmixed(value: Any, view: GraphView) -> tuple[Any, Any] | None:
    """Match head mixing, Reshape(W @ Reshape(x)): return (Wᵀ, x), or None for any other value."""
    if view.kind(value) != "reshape":
        return None
    product = view.inputs(value)[0]
    if view.kind(product) != "matrix product":
        return None
    weights, flat = view.constant(view.inputs(product)[0]), view.plain(view.inputs(product)[1])
    if weights is None or weights.ndim != 2 or not view.takes_constant(weights) or view.kind(flat) != "reshape":
        return None
    flattened, apart = view.target(flat), view.target(value)
    # (B, H, n, n) → (B, H, n²) → (B, H, n, n); the shapes here are without the batch
    if not flattened or not apart or (len(flattened), len(apart)) != (2, 3) or flattened[0] != apart[0]:
        return None
    return np.ascontiguousarray(weights.T, np.float32), view.inputs(flat)[0]


def _part(value: Any, what: str, view: GraphView, *, across: bool = False) -> Part:
    """Match Transpose(Reshape(x)), where x may be an output of a Split that cuts the last dimension equally.

    what: "queries", "keys" or "values", for messages.  across: whether the value is Kᵀ, with the tokens last.
    """
    orders = _KEYS_ACROSS if across else _HEADS_APART
    before_join = _before_join(value, view, across=across)
    if before_join is not None:
        value, orders = before_join, _HEADS_APART
    reshape = view.inputs(value)[0] if view.kind(value) == "transpose" else None
    if reshape is None or view.kind(reshape) != "reshape" or view.order(value) not in orders:
        if change := change_after_split(value, view):
            _refuse(f"its {what} are {change} after the split into heads, which the kernel does not compute")
        _refuse(f"its {what} come from {view.kind(value)}, expected a Reshape and a Transpose that split into heads")
    apart = view.target(reshape)
    if apart is None or len(apart) < 3:
        _refuse(f"the graph does not state the number of heads of its {what}")
    *rows, heads, head_dim = apart
    columns = view.columns(view.inputs(reshape)[0])
    if columns is None:
        _refuse(f"the Split before its {what} does not cut the last dimension into equal outputs")
    source, index, outputs = columns
    if kind := view.refused_type(source):
        _refuse(f"it computes in {kind}, a type that the kernel does not support")
    if view.shape(source) is None:
        _refuse(f"the graph does not state the shape of the tensor that its {what} are cut from")
    expected = (*rows, outputs * heads * head_dim)
    if view.shape(source) != expected:
        _refuse(f"its {what} are cut from a tensor of shape {_words(view.shape(source))}, expected {_words(expected)}")
    return Part(source, index * heads * head_dim, tuple(rows), heads, head_dim, before_join is not None)


def _before_join(value: Any, view: GraphView, *, across: bool) -> Any:
    """Return the value (B, W, H, n, d) that a Reshape turns into (B, W · H, n, d), or None for any other value.

    across: whether a Transpose follows, (B, W · H, d, n).
    """
    if across:
        if view.kind(value) != "transpose" or view.order(value) != [0, 1, 3, 2]:
            return None
        value = view.plain(view.inputs(value)[0])
    if view.kind(value) != "reshape":
        return None
    apart = view.plain(view.inputs(value)[0])
    if view.kind(apart) != "transpose" or view.order(apart) != _HEADS_APART[1]:
        return None
    reshape = view.inputs(apart)[0]
    split = view.target(reshape) if view.kind(reshape) == "reshape" else None
    if split is None or len(split) != 4:
        return None
    windows, n, heads, head_dim = split
    return apart if view.target(value) == (windows * heads, n, head_dim) else None


def _constant_and_other(value: Any, kind: str, view: GraphView) -> tuple[Any, Any] | None:
    """Return (the constant input, the other input) of the operator that computes this value.

    Returns None if the operator is of another kind than ``kind``, or does not have exactly 1 constant input.
    """
    if view.kind(value) != kind:
        return None
    first, second = view.inputs(value)
    constants = view.constant(first), view.constant(second)
    if (constants[0] is None) == (constants[1] is None):
        return None
    return (constants[0], second) if constants[0] is not None else (constants[1], first)


def _count(n: int, token: str) -> str:
    return f"{n} {token} token{'s' * (n != 1)}"


def _words(shape: Sequence[int] | None) -> str:
    return "unknown" if shape is None else f"({', '.join(map(str, shape))})"
