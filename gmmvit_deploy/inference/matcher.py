"""Find the attentions in an OpenVINO model that this project's kernel computes.

    O = after(softmax(before((Q Kᵀ) ∘ M + B))) V

    Q               (batch, …, heads, q, head_dim), with q query tokens; "…" is the dimension of windows, or nothing
    K, V            (batch, …, heads, n, head_dim), with n tokens; q = n, or q = 1 in class attention
    M               the mask, (heads, q, n) or (q, n) for all heads, or a number that scales the scores;
                    ∘ is the elementwise multiplication
    B               the bias, (…, heads, q, n) or (q, n) for all heads, or absent
    before, after   head mixing: each multiplies the heads by a (heads, heads) matrix; ``before`` needs ``after``

In the graph, Split, Reshape and Transpose cut the last dimension ("columns") of a tensor (batch, …, n, columns) into
Q, K and V. Q may be cut from another tensor than K and V. Q and K may be normalised and rotated by their position
(`rotation.py`), without windows and head mixing. A Transpose and a Reshape merge the heads of O. The matcher refuses
every other attention, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from .openvino_view import (
    constant,
    constant_and_other,
    inputs_of,
    kind_of,
    nodes_of,
    order_of,
    reader_of,
    shape_of,
    takers,
)
from .prepared_masks import takes_bias
from .rotation import Rotation, rotation_of

_MAX_MIXED = 16
"""The maximum number of heads for head mixing in the kernel."""
# Permutations of the Transposes: element 0 is without a dimension of windows W, element 1 is with it.
_HEADS_APART = [0, 2, 1, 3], [0, 1, 3, 2, 4]
"""(B, n, H, d) → (B, H, n, d), and (B, W, n, H, d) → (B, W, H, n, d).  Each permutation is its own inverse."""
_KEYS_ACROSS = [0, 2, 3, 1], [0, 1, 3, 4, 2]
"""(B, n, H, d) → (B, H, d, n), and (B, W, n, H, d) → (B, W, H, d, n)."""
_KEYS_TURNED = [0, 1, 3, 2], [0, 1, 2, 4, 3]
"""(B, H, n, d) → (B, H, d, n), and (B, W, H, n, d) → (B, W, H, d, n)."""
_ROTATION_AND_MIXING = (
    "it has both head mixing and rotated or normalised queries or keys, which the kernel does not combine"
)
_BIAS_AND_MIXING = "it has both a bias and head mixing, which the kernel does not combine"


@dataclass(frozen=True, eq=False)
class Part:
    """Q, K or V: a range of the last dimension of a tensor, which a Reshape turns into (B, …, n, heads, head_dim).

    source: the tensor, (B, …, n, columns).  column: the first of the range.  rows: (…, n), without the batch.
    """

    source: Any
    column: int
    rows: tuple[int, ...]
    heads: int
    head_dim: int


@dataclass(frozen=True, eq=False)
class MatchedAttention:
    """An attention that the kernel computes.

    name: of its module.  parts: Q, K and V, with equal windows, heads and head_dim; K and V have equal rows.
    mask: (heads, queries, tokens), (1, queries, tokens) for all heads, or None.
    scale: the number that multiplies the scores; 1 with a mask, which includes it.
    bias: with the shape that it has in the graph, or None.
    mixing: the head mixing matrices (before or None, after), each indexed [from head, to head]; () without head mixing.
    rotations: of Q and of K; None where the split into heads is the last step before Q Kᵀ.
    last: the value of the attention's output, (B, …, n, heads · head_dim).
    """

    name: str
    parts: tuple[Part, Part, Part]
    mask: Any
    scale: float
    bias: Any
    mixing: tuple[Any, ...]
    rotations: tuple[Rotation | None, Rotation | None]
    last: Any

    @property
    def heads(self) -> int:
        return self.parts[0].heads

    @property
    def head_dim(self) -> int:
        return self.parts[0].head_dim

    @property
    def queries(self) -> int:
        return self.parts[0].rows[-1]

    @property
    def tokens(self) -> int:
        return self.parts[1].rows[-1]

    @property
    def windows(self) -> tuple[int, ...]:
        """The dimensions of the scores between batch and heads: (number of windows,), or () without windows."""
        return self.parts[0].rows[:-1]


@dataclass(frozen=True)
class Refusal:
    """An attention that the kernel does not compute.  reason: such as "it mixes 20 heads, expected at most 16"."""

    name: str
    reason: str


class _RefusedError(Exception):
    pass


def attentions_in(model: Any) -> list[MatchedAttention | Refusal]:
    """Return for each softmax of an ``openvino.Model``, in topological order, the attention around it or a refusal."""
    matches: list[MatchedAttention | Refusal] = []
    for softmax in nodes_of(model, "Softmax"):
        full = str(softmax.get_friendly_name())
        name = full.rpartition("/")[0] or full
        try:
            matches.append(_matched(softmax.output(0), name))
        except _RefusedError as exc:
            matches.append(Refusal(name, str(exc)))
    return matches


def summary_of(matches: Sequence[MatchedAttention | Refusal]) -> str:
    """Return for example ``3 of 4; not: blocks.3.attention (it mixes 20 heads, expected at most 16)``."""
    by_reason: dict[str, list[str]] = {}
    for match in matches:
        if isinstance(match, Refusal):
            by_reason.setdefault(match.reason, []).append(match.name)
    taken = len(matches) - sum(map(len, by_reason.values()))
    refused = [f"{', '.join(names)} ({reason})" for reason, names in by_reason.items()]
    return f"{taken} of {len(matches)}" + (f"; not: {'; '.join(refused)}" if refused else "")


def _refuse(reason: str) -> NoReturn:
    raise _RefusedError(reason)


def _matched(softmax: Any, name: str) -> MatchedAttention:
    rank = softmax.get_partial_shape().rank
    last_axis = rank.get_length() - 1 if rank.is_static else -1
    if int(softmax.get_node().get_attributes()["axis"]) not in (-1, last_axis):
        _refuse("its softmax does not run over the keys, the last dimension")
    query, key, factor, bias, before = _scores(softmax)
    value, last, after = _output(softmax)
    query, of_query = _unrotated(query)
    key, of_key = _unrotated(key, across=True)
    rotations = of_query, of_key
    q = _part(query, "queries")
    k = _part(key, "keys", across=of_key is None)
    v = _part(value, "values")
    _require_equal_sizes(q, k, v)
    rows, heads, head_dim, queries, n = q.rows, q.heads, q.head_dim, q.rows[-1], k.rows[-1]
    mixing = _mixing(before, after, heads)
    if shape_of(last) != (*rows, heads * head_dim):
        _refuse(f"its output has shape {_words(shape_of(last))}, expected {_words((*rows, heads * head_dim))}")
    if bias is not None and mixing:
        _refuse(_BIAS_AND_MIXING)
    if mixing and rotations != (None, None):
        _refuse(_ROTATION_AND_MIXING)
    if bias is not None and not takes_bias(bias.shape, heads, (queries, n), rows[:-1]):
        _refuse(f"its bias has shape {_words(bias.shape)}, expected {_words((*rows[:-1], heads, queries, n))}")
    if factor.size == 1:
        return MatchedAttention(name, (q, k, v), None, float(factor.reshape(())), bias, mixing, rotations, last)
    if factor.shape != (queries, n) and not (
        factor.shape[-3:] == (heads, queries, n) and factor.size == heads * queries * n
    ):
        _refuse(f"its mask has shape {_words(factor.shape)}, expected {_words((heads, queries, n))}")
    return MatchedAttention(name, (q, k, v), factor.reshape(-1, queries, n), 1.0, bias, mixing, rotations, last)


def _require_equal_sizes(q: Part, k: Part, v: Part) -> None:
    if q.rows[:-1] == k.rows[:-1] and q.rows[-1] not in (1, k.rows[-1]):
        _refuse(
            f"it has {_count(q.rows[-1], 'query')} and {_count(k.rows[-1], 'key')}, "
            "expected equal numbers or a single query token"
        )
    # A tensor that is the same for all images, such as a learned query, has the first dimension 1.
    batches = [part.source.get_partial_shape()[0] for part in (q, k, v)]
    if len({batch.get_length() if batch.is_static else None for batch in batches}) > 1:
        _refuse("its queries, keys and values differ in the batch dimension")
    shapes = [(*part.rows, part.heads, part.head_dim) for part in (q, k, v)]
    without_tokens = {(*part.rows[:-1], part.heads, part.head_dim) for part in (q, k, v)}
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
    if heads > _MAX_MIXED:
        _refuse(f"it mixes {heads} heads, expected at most {_MAX_MIXED}")
    return before, after


def _scores(softmax: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Return (Q, Kᵀ, M or the scale, the bias or None, ``before`` or None), which give the input of this softmax."""
    unit = np.ones((), np.float32)
    at, before = inputs_of(softmax)[0], None
    mixed = _unmixed(at)
    if mixed is not None:
        before, at = mixed
    bias, at = constant_and_other(at, "addition") or (None, at)
    if bias is not None and _unmixed(at) is not None:
        _refuse(_BIAS_AND_MIXING)
    factor, at = constant_and_other(at, "multiplication") or (unit, at)
    if kind_of(at) != "matrix product":
        _refuse(_unknown_before(at))
    query, key = inputs_of(at)
    scale, unscaled = constant_and_other(query, "multiplication") or (unit, query)
    factor = np.asarray(factor, np.float32)
    if scale.size == 1:  # the graph may scale Q instead of the scores
        factor, query = factor * scale.reshape(()), unscaled
    return query, key, factor, bias, before


def _output(softmax: Any) -> tuple[Any, Any, Any]:
    """Follow the graph after a softmax.  Returns (V, the output with merged heads, the matrix ``after`` or None)."""
    weights, after = softmax, None
    at = reader_of(weights)
    if at is not None and kind_of(at) == "reshape":
        product = reader_of(at)
        back = None if product is None else reader_of(product)
        mixed = None if back is None else _unmixed(back)
        if mixed is None:
            _refuse("the Reshape after its softmax does not belong to head mixing")
        after, weights = mixed[0], back
        at = reader_of(weights)
    if at is None:
        kinds = sorted(kind_of(taker.output(0)) for taker in takers(weights.get_node()))
        readers = ", ".join(kinds) or "no operator"
        _refuse(f"its attention weights are read by {readers}, expected only the matrix product with V")
    if kind_of(at) != "matrix product":
        _refuse(f"{kind_of(at)} stands after its softmax, expected head mixing or the matrix product with V")
    value = inputs_of(at)[1]
    transpose = reader_of(at)
    last = reader_of(transpose) if _is_transpose(transpose, _HEADS_APART) else None
    if last is None or kind_of(last) != "reshape":
        _refuse("its heads are not merged by a Transpose and a Reshape")
    return value, last, after


def _is_transpose(value: Any, orders: tuple[list[int], list[int]]) -> bool:
    return value is not None and kind_of(value) == "transpose" and order_of(value) in orders


def _unmixed(value: Any) -> tuple[Any, Any] | None:
    """Match head mixing, Reshape(W @ Reshape(x)): return (Wᵀ, x), or None for any other value."""
    if kind_of(value) != "reshape":
        return None
    product = inputs_of(value)[0]
    if kind_of(product) != "matrix product":
        return None
    weights, flat = constant(inputs_of(product)[0]), inputs_of(product)[1]
    if weights is None or weights.ndim != 2 or kind_of(flat) != "reshape":
        return None
    flattened, apart = shape_of(flat), shape_of(value)
    # (B, H, n, n) → (B, H, n²) → (B, H, n, n); the shapes here are without the batch
    if not flattened or not apart or (len(flattened), len(apart)) != (2, 3) or flattened[0] != apart[0]:
        return None
    return np.ascontiguousarray(weights.T, np.float32), inputs_of(flat)[0]


def _unrotated(value: Any, *, across: bool = False) -> tuple[Any, Rotation | None]:
    """Return (Q or K before its norm and rotation, the rotation); (value, None) if no such form is found.

    across: the value is Kᵀ; with a rotation, K is returned.
    """
    rows = inputs_of(value)[0] if across and _is_transpose(value, _KEYS_TURNED) else value
    if _splits_heads(rows) or (across and rows is value):
        return value, None
    return rotation_of(rows, _splits_heads) or (value, None)


def _splits_heads(value: Any) -> bool:
    return _is_transpose(value, _HEADS_APART) and kind_of(inputs_of(value)[0]) == "reshape"


def _part(value: Any, what: str, *, across: bool = False) -> Part:
    """Match Transpose(Reshape(x)), where x may be an output of an equal Split.  across: the value is Kᵀ."""
    reshape = inputs_of(value)[0] if _is_transpose(value, _KEYS_ACROSS if across else _HEADS_APART) else None
    if reshape is None or kind_of(reshape) != "reshape":
        if change := _change_after_split(value):
            _refuse(f"its {what} are {change} after the split into heads in a form that the kernel does not compute")
        _refuse(f"its {what} come from {kind_of(value)}, expected a Reshape and a Transpose that split into heads")
    apart = shape_of(reshape)
    if apart is None or len(apart) < 3:
        _refuse(f"the graph does not state the number of heads of its {what}")
    *rows, heads, head_dim = apart
    source, index, outputs = _columns(inputs_of(reshape)[0])
    if shape_of(source) is None:
        _refuse(f"the graph does not state the shape of the tensor that its {what} are cut from")
    expected = (*rows, outputs * heads * head_dim)
    if shape_of(source) != expected:
        _refuse(f"its {what} are cut from a tensor of shape {_words(shape_of(source))}, expected {_words(expected)}")
    return Part(source, index * heads * head_dim, tuple(rows), heads, head_dim)


def _columns(value: Any) -> tuple[Any, int, int]:
    """Return (input, index, number of outputs) of a Split of the last dimension; (value, 0, 1) for any other value."""
    node, shape = value.get_node(), shape_of(value)
    axis = constant(node.input_value(1)) if node.get_type_name() == "Split" else None
    if axis is None or shape is None or int(axis.reshape(())) not in (-1, len(shape)):
        return value, 0, 1
    return node.input_value(0), value.get_index(), len(node.outputs())


# ---- reasons of refusals -------------------------------------------------------------------------------------------


def _change_after_split(value: Any) -> str:
    """Return how Q or K changes between the split into heads and Q Kᵀ: "normalised", "rotated …", or "" if unknown."""
    at = inputs_of(value)[0] if kind_of(value) == "transpose" else value
    if kind_of(at) == "Concat":  # prefix tokens, which are not rotated, beside rotated patch tokens
        at = inputs_of(at)[-1]
    operands = inputs_of(at) if kind_of(at) == "addition" else []
    factors = [operand for operand in operands if kind_of(operand) == "multiplication"]
    if len(factors) == 2:
        return "rotated by their position"
    # OpenVINO computes LayerNorm as MVN, a multiplication by the weight and an addition of the bias.
    inner = [operand for factor in factors for operand in inputs_of(factor)]
    return "normalised" if "MVN" in (kind_of(at), *map(kind_of, inner)) else ""


def _unknown_before(value: Any) -> str:
    """Return why the operator that computes this value, from which the scores come, is not part of an attention."""
    kind = kind_of(value)
    if kind not in ("multiplication", "addition"):
        return f"{kind} stands before its softmax, expected Q Kᵀ, a mask, a bias or head mixing"
    if all(constant(operand) is None for operand in inputs_of(value)):
        return f"the {kind} before its softmax has no constant input, expected a constant mask or bias"
    place = "expected Q Kᵀ, then at most a mask, then at most a bias"
    return f"the {kind} before its softmax is in an unexpected place: {place}"


def _count(n: int, token: str) -> str:
    return f"{n} {token} token{'s' * (n != 1)}"


def _words(shape: Sequence[int] | None) -> str:
    return "unknown" if shape is None else f"({', '.join(map(str, shape))})"
