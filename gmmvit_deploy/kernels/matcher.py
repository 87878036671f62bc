"""Find the attentions that our kernel computes.  Imports only modules beside it: it is copied into a server's model.

    O = after(softmax(before((Q Kᵀ) ∘ M + B))) V        M: (heads, n, n) or a number; B: (…, heads, n, n) or absent
                                                        before, after: products over heads, both or neither

Q, K and V are cut out of columns (…, n, columns) by Split, Reshape and Transpose; O is put back by Transpose and
Reshape. Every other attention is refused, with the reason. The algorithm works on `GraphView`, which `onnx_view.py`
and `openvino_view.py` implement for their graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np

# A relative import, because a server's model has this module beside this file too.
from .prepared_masks import LANES, takes_bias

__all__ = ["GraphView", "MatchedAttention", "Part", "Refusal", "attentions_in", "summary_of"]

_MOST_MIXED = 16
# Without and with a dimension for windows:
_HEADS_APART = [0, 2, 1, 3], [0, 1, 3, 2, 4]  # (B, n, H, d) → (B, H, n, d), and back
_KEYS_ACROSS = [0, 2, 3, 1], [0, 1, 3, 4, 2]  # (B, n, H, d) → (B, H, d, n)


class GraphView(Protocol):
    """What the matcher asks of a graph.  A value is the object by which the graph's library identifies a tensor.

    ``kind`` and ``inputs`` describe the operator that computes a value.  Shapes are without the batch.
    """

    def softmaxes(self) -> Sequence[Any]:
        """Return the outputs of all softmaxes, in the graph's order."""

    def name(self, value: Any) -> str:
        """Return the name of the operator that computes the value, such as ``blocks.0.attention/Softmax``."""

    def kind(self, value: Any) -> str:
        """Return ``product`` (a MatMul that transposes neither factor), ``multiply``, ``add``, ``reshape``,
        ``transpose``, ``softmax`` or ``conversion``; for any other operator the name that its library has for it.
        """

    def inputs(self, value: Any) -> Sequence[Any]: ...

    def constant(self, value: Any) -> Any:
        """Return the numpy array of a constant; None for a computed value."""

    def plain(self, value: Any) -> Any:
        """Return the value before type conversions, if the kernel computes across them."""

    def reader(self, value: Any, *, through_conversions: bool = False) -> Any:
        """Return the output of the only operator that reads this value; None unless it has exactly 1 reader."""

    def readers(self, value: Any) -> list[str]:
        """Return the kinds of all operators that read this value."""

    def shape(self, value: Any) -> tuple[int, ...] | None:
        """Return the shape of a value; None if a dimension is unknown."""

    def target(self, value: Any) -> tuple[int, ...] | None:
        """Return the shape that a reshape produces; None if a dimension is unknown."""

    def order(self, value: Any) -> list[int]:
        """Return the permutation of a transpose."""

    def axis(self, value: Any) -> int:
        """Return the axis of a softmax."""

    def columns(self, value: Any) -> tuple[Any, int, int] | None:
        """Return (source, index, parts) of an equal part of a source's last dimension; None for any other split.

        Returns (value, 0, 1) for a value that is not split.
        """

    def refused_type(self, value: Any) -> str:
        """Return the value's type if the kernel does not compute in it, else an empty string."""

    def takes_constant(self, array: Any) -> bool:
        """Return whether the kernel takes constants of this type."""


@dataclass(frozen=True, eq=False)
class Part:
    """Q, K or V: (B, …, n, heads, head_dim), the columns of ``source`` (B, …, n, columns) from ``column`` on.

    rows: (…, n), tokens last.
    """

    source: Any
    column: int
    rows: tuple[int, ...]
    heads: int
    head_dim: int


@dataclass(frozen=True, eq=False)
class MatchedAttention:
    """An attention that the kernel computes.

    name: of its module.  parts: Q, K, V, with the same rows, heads and head dim.
    mask: (heads, n, n), or None.  scale: a number that the scores are multiplied by; 1 with a mask.
    bias: as the graph has it, or None.  mixing: () or (before, after), each [from head, to head].
    last: the attention's output, (B, …, n, heads · head_dim).
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
    def tokens(self) -> int:
        return self.parts[0].rows[-1]

    @property
    def windows(self) -> tuple[int, ...]:
        """Dimensions between batch and heads."""
        return self.parts[0].rows[:-1]


@dataclass(frozen=True)
class Refusal:
    """An attention that the kernel does not take.  name: of its module.  reason: a clause for messages."""

    name: str
    reason: str


class _RefusedError(Exception):
    pass


def attentions_in(view: GraphView) -> list[MatchedAttention | Refusal]:
    """Return, for every softmax of a graph in its order, the attention around it or why the kernel does not take it."""
    return [_attention_of(softmax, view) for softmax in view.softmaxes()]


def summary_of(matches: Sequence[MatchedAttention | Refusal]) -> str:
    """Summarise: ``3 of 5; not: blocks.3.attention (its head dim 12 is not a multiple of 16)``; each reason once."""
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
    query, key, factor, bias, before = _scores(softmax, view)
    value, last, after = _output(softmax, view)
    q = _part(query, "queries", _HEADS_APART, view)
    k = _part(key, "keys", _KEYS_ACROSS, view)
    v = _part(value, "values", _HEADS_APART, view)
    _require_equal_sizes(q, k, v)
    rows, heads, head_dim = q.rows, q.heads, q.head_dim
    if view.axis(softmax) not in (-1, len(rows) + 2):
        _refuse("its softmax is not over the keys")
    if head_dim % LANES:
        _refuse(f"its head dim {head_dim} is not a multiple of {LANES}")
    mixing = _mixing(before, after, heads)
    if view.refused_type(last) or view.shape(last) != (*rows, heads * head_dim):
        _refuse(f"its output has shape {_words(view.shape(last))}, expected {_words((*rows, heads * head_dim))}")
    n = rows[-1]
    if bias is not None and mixing:
        _refuse("it has a bias beside its head mixing")
    if bias is not None and not takes_bias(bias.shape, heads, n, rows[:-1]):
        _refuse(f"its bias has shape {_words(bias.shape)}, expected {_words((*rows[:-1], heads, n, n))}")
    if factor.size == 1:
        return MatchedAttention(name, (q, k, v), None, float(factor.reshape(())), bias, mixing, last)
    if factor.shape[-3:] != (heads, n, n) or factor.size != heads * n * n:
        _refuse(f"its mask has shape {_words(factor.shape)}, expected {_words((heads, n, n))}")
    return MatchedAttention(name, (q, k, v), factor.reshape(heads, n, n), 1.0, bias, mixing, last)


def _require_equal_sizes(q: Part, k: Part, v: Part) -> None:
    if q.rows != k.rows and len(q.rows) == len(k.rows) == 1:
        _refuse(f"its queries are {_tokens(q.rows[0])} and its keys {k.rows[0]}")
    sizes = {(part.rows, part.heads, part.head_dim) for part in (q, k, v)}
    if len(sizes) != 1:
        words = [_words((*part.rows, part.heads, part.head_dim)) for part in (q, k, v)]
        _refuse(f"its queries, keys and values differ in shape: {', '.join(words)}")


def _mixing(before: Any, after: Any, heads: int) -> tuple[Any, ...]:
    if before is None and after is None:
        return ()
    if before is None or after is None:
        _refuse(f"it mixes heads only {'before' if after is None else 'after'} its softmax")
    for matrix in (before, after):
        if matrix.shape != (heads, heads):
            _refuse(f"its head mixing has shape {_words(matrix.shape)}, expected {_words((heads, heads))}")
    if heads > _MOST_MIXED:
        _refuse(f"it mixes {heads} heads, expected at most {_MOST_MIXED}")
    return before, after


def _scores(softmax: Any, view: GraphView) -> tuple[Any, Any, Any, Any, Any]:
    """Return (Q, Kᵀ, M or the scale, the bias or None, the mixing or None) of the input of this softmax."""
    unit = np.ones((), np.float32)
    at, before = view.plain(view.inputs(softmax)[0]), None
    mixed = _unmixed(at, view)
    if mixed is not None:
        before, at = mixed
    bias, at = _constant_and_other(at, "add", view) or (None, at)
    factor, at = _constant_and_other(view.plain(at), "multiply", view) or (unit, at)
    at = view.plain(at)
    if view.kind(at) != "product":
        _refuse(_unknown_step(at, "before", view))
    for constant in (factor, bias):
        if constant is not None and not view.takes_constant(constant):
            _refuse(f"its constants are {constant.dtype}, which the kernel does not take")
    query, key = map(view.plain, view.inputs(at))
    scale, unscaled = _constant_and_other(query, "multiply", view) or (unit, query)
    factor = np.asarray(factor, np.float32)
    if scale.size == 1 and view.takes_constant(scale):  # of Q alone, before the product
        factor, query = factor * scale.reshape(()), view.plain(unscaled)
    return query, key, factor, bias, before


def _output(softmax: Any, view: GraphView) -> tuple[Any, Any, Any]:
    """Return (V, the value with the heads side by side again, the mixing or None)."""
    weights, after = softmax, None
    at = view.reader(weights, through_conversions=True)
    if at is not None and view.kind(at) == "reshape":
        product = view.reader(at, through_conversions=True)
        back = None if product is None else view.reader(product)
        mixed = None if back is None else _unmixed(back, view)
        if mixed is None:
            _refuse("a Reshape that is no part of head mixing stands after its softmax")
        after, weights = mixed[0], back
        at = view.reader(weights, through_conversions=True)
    if at is None:
        _refuse(f"its weights go to more than the product with its values: {', '.join(view.readers(weights))}")
    if view.kind(at) != "product":
        _refuse(_unknown_step(at, "after", view))
    value = view.plain(view.inputs(at)[1])
    transpose = view.reader(at)
    last = None if transpose is None else view.reader(transpose)
    back_in_order = transpose is not None and view.kind(transpose) == "transpose"
    if not back_in_order or view.order(transpose) not in _HEADS_APART or last is None or view.kind(last) != "reshape":
        _refuse("its heads are not put side by side again by a Transpose and a Reshape")
    return value, last, after


def _unmixed(value: Any, view: GraphView) -> tuple[Any, Any] | None:
    """Match Reshape(W @ Reshape(x)), heads mixed by a product: return (Wᵀ, x), or None for any other value."""
    if view.kind(value) != "reshape":
        return None
    product = view.inputs(value)[0]
    if view.kind(product) != "product":
        return None
    weights, flat = view.constant(view.inputs(product)[0]), view.plain(view.inputs(product)[1])
    if weights is None or weights.ndim != 2 or not view.takes_constant(weights) or view.kind(flat) != "reshape":
        return None
    flattened, apart = view.target(flat), view.target(value)
    # (B, H, n, n) → (B, H, n²) → back
    if not flattened or not apart or (len(flattened), len(apart)) != (2, 3) or flattened[0] != apart[0]:
        return None
    return np.ascontiguousarray(weights.T, np.float32), view.inputs(flat)[0]


def _part(value: Any, what: str, orders: tuple[list[int], ...], view: GraphView) -> Part:
    """Match Transpose(Reshape(x)), where x may be an equal part of a Split along the columns."""
    reshape = view.inputs(value)[0] if view.kind(value) == "transpose" else None
    if reshape is None or view.kind(reshape) != "reshape" or view.order(value) not in orders:
        _refuse(f"its {what} are not columns cut into heads by a Reshape and a Transpose: {view.kind(value)}")
    apart = view.target(reshape)
    if apart is None or len(apart) < 3:
        _refuse(f"the graph does not state how many heads its {what} have")
    *rows, heads, head_dim = apart
    columns = view.columns(view.inputs(reshape)[0])
    if columns is None:
        _refuse(f"its {what} are no equal part of a Split along the columns")
    source, index, parts = columns
    if kind := view.refused_type(source):
        _refuse(f"it computes in {kind}, which the kernel does not take")
    if view.shape(source) is None:
        _refuse(f"the graph does not state the shape of the tensor that its {what} are cut from")
    width = heads * head_dim
    if view.shape(source) != (*rows, parts * width):
        _refuse(f"its {what} come from {_words(view.shape(source))}, expected {_words((*rows, parts * width))}")
    return Part(source, index * width, tuple(rows), heads, head_dim)


def _constant_and_other(value: Any, kind: str, view: GraphView) -> tuple[Any, Any] | None:
    """Return (constant, other input) of the operator of this value; None for another kind, or without 1 constant."""
    if view.kind(value) != kind:
        return None
    first, second = view.inputs(value)
    constants = view.constant(first), view.constant(second)
    if (constants[0] is None) == (constants[1] is None):
        return None
    return (constants[0], second) if constants[0] is not None else (constants[1], first)


def _unknown_step(value: Any, side: str, view: GraphView) -> str:
    kind = view.kind(value)
    if kind == "conversion":
        return f"it changes its type {side} its softmax, and the kernel computes in one type"
    if kind in ("multiply", "add") and side == "before":
        what = "neither of one constant and one computed value, nor" if _both_computed(value, view) else "not"
        return f"the {kind} before its softmax is {what} in the order of a mask, then a bias"
    taken = "a product, a sum or head mixing" if side == "before" else "a product or head mixing"
    return f"a step that is not {taken} stands {side} its softmax: {kind}"


def _both_computed(value: Any, view: GraphView) -> bool:
    return all(view.constant(operand) is None for operand in view.inputs(value))


def _tokens(n: int) -> str:
    return "1 token" if n == 1 else f"{n} tokens"


def _words(shape: Sequence[int] | None) -> str:
    return "an unknown shape" if shape is None else f"({', '.join(map(str, shape))})"
