"""Our fused masked attention inside ONNX Runtime.

    Split, Reshape, Transpose, MatMul, Mul by M, Add, Softmax, MatMul, Transpose, Reshape  →  one node

which `masked_attention.c` computes in one pass over the cache. Only what is exactly this, in float32, is replaced (with
a bias or not; within windows, as in Swin, or not; or with heads mixed before and after softmax, as in CaiT); whatever
else a graph has stays ONNX Runtime's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.kernels.prepared_masks import LANES, prepared_bias, prepared_mask

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto

__all__ = ["DOMAIN", "with_fused_attention"]

DOMAIN = "gmmvit"
_MOST_MIXED = 16
# With a dimension for windows, or without:
_HEADS_APART = [0, 2, 1, 3], [0, 1, 3, 2, 4]  # (B, n, H, d) → (B, H, n, d), and back
_KEYS_ACROSS = [0, 2, 3, 1], [0, 1, 3, 4, 2]  # (B, n, H, d) → (B, H, d, n)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Q, K or V: (B, …, n, H, d) of columns of ``source`` (B, …, n, columns), from ``column`` on.

    rows: (…, n).
    """

    source: str
    column: int
    rows: tuple[int, ...]
    heads: int
    width: int


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """mask: (H, n, n), or None and ``scale`` times 1 is its.  bias: as the kernel wants it, or None.

    mixing: [h, g], before and after softmax; or ().
    """

    parts: tuple[_Part, ...]
    mask: NDArray[Any] | None
    scale: float
    bias: NDArray[Any] | None
    mixing: tuple[NDArray[Any], ...]
    last: NodeProto


def with_fused_attention(proto: ModelProto) -> tuple[ModelProto, int]:
    """(a new graph, how many of its attentions are one node now)."""
    from onnx import helper, numpy_helper

    out = type(proto)()
    out.CopyFrom(proto)
    wiring = _Wiring(out.graph)
    found = [form for node in out.graph.node if node.op_type == "Softmax" and (form := _matched(node, wiring))]
    if not found:
        return out, 0
    replaced = {}
    for index, form in enumerate(found):
        mask = None if form.mask is None else prepared_mask(form.mask, "f32")
        constants = [mask and mask.numbers, form.bias, *(form.mixing or (None, None))]
        names = ["" if one is None else f"{DOMAIN}.{index}.{place}" for place, one in enumerate(constants)]
        out.graph.initializer.extend(
            numpy_helper.from_array(one, name) for name, one in zip(names, constants, strict=True) if one is not None
        )
        query, key, value = form.parts
        replaced[form.last.output[0]] = helper.make_node(
            "MaskedAttention",
            [query.source, key.source, value.source, *names],
            list(form.last.output),
            name=form.last.name,
            domain=DOMAIN,
            heads=query.heads,
            n=query.rows[-1],
            windows=1 if form.bias is None else len(form.bias),
            d=query.width,
            grid=mask.grid if mask else 0,
            q_column=query.column,
            k_column=key.column,
            v_column=value.column,
            scale=form.scale,
        )
    nodes = [replaced.get(node.output[0], node) for node in out.graph.node]
    _keep_what_is_read(out.graph, nodes)
    out.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return out, len(found)


def _keep_what_is_read(graph: GraphProto, nodes: list[NodeProto]) -> None:
    read = {one.name for one in graph.output}
    kept = []
    for node in reversed(nodes):
        if read.intersection(node.output):
            kept.append(node)
            read.update(node.input)
    constants = [one for one in graph.initializer if one.name in read]
    made = {name for node in kept for name in node.output}
    values = [one for one in graph.value_info if one.name in made]
    kept.reverse()
    del graph.node[:], graph.initializer[:], graph.value_info[:]
    graph.node.extend(kept)
    graph.initializer.extend(constants)
    graph.value_info.extend(values)


# ---- finding it in a graph -------------------------------------------------------------------------------------


class _Wiring:
    def __init__(self, graph: GraphProto) -> None:
        self.maker = {name: node for node in graph.node for name in node.output}
        self.readers: dict[str, list[NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self._constants = {one.name: one for one in graph.initializer}
        self._shapes = {one.name: _shape(one) for one in graph.value_info}

    def constant(self, name: str) -> NDArray[Any] | None:
        from onnx import numpy_helper

        found = self._constants.get(name)
        return None if found is None else numpy_helper.to_array(found)

    def constant_and_other(self, name: str, operator: str) -> tuple[NDArray[Any], str] | None:
        """(the constant, the other input) of what makes this value, if it is this operator of one constant."""
        node = self.made_by(name, operator)
        constants = [self.constant(one) for one in node.input] if node is not None else []
        found = [one for one in constants if one is not None]
        if node is None or len(found) != 1:
            return None
        return found[0], node.input[1 if constants[0] is not None else 0]

    def made_by(self, name: str, operator: str) -> NodeProto | None:
        node = self.maker.get(name)
        return node if node is not None and node.op_type == operator else None

    def only_reader(self, node: NodeProto | None, operator: str) -> NodeProto | None:
        readers = self.readers.get(node.output[0], []) if node is not None else []
        return readers[0] if len(readers) == 1 and readers[0].op_type == operator else None

    def inner_shape(self, name: str) -> tuple[int, ...] | None:
        """Of float32, all but the batch; None for anything else, or if it is not known."""
        shape = self._shapes.get(name)
        return tuple(shape[1:]) if shape is not None and len(shape) > 1 and min(shape[1:]) > 0 else None

    def product(self, node: NodeProto | None) -> tuple[str, str] | None:
        """The factors of a product of two computed values."""
        if node is None or node.op_type != "MatMul" or any(name in self._constants for name in node.input):
            return None
        return node.input[0], node.input[1]


def _shape(value: ValueInfoProto) -> list[int] | None:
    kind = value.type.tensor_type
    if kind.elem_type != 1:  # float32
        return None
    return [one.dim_value if one.HasField("dim_value") else -1 for one in kind.shape.dim]


def _matched(softmax: NodeProto, wiring: _Wiring) -> _Form | None:
    axis = next((one.i for one in softmax.attribute if one.name == "axis"), -1)
    above, below = _scores(softmax, wiring), _output(softmax, wiring)
    if above is None or below is None:
        return None
    query, key, factor, bias, before = above
    value, last, after = below
    orders = (_HEADS_APART, _KEYS_ACROSS, _HEADS_APART)
    parts = [
        part
        for name, order in zip((query, key, value), orders, strict=True)
        if (part := _part(name, order, wiring)) is not None
    ]
    if len(parts) != 3 or len({(part.rows, part.heads, part.width) for part in parts}) != 1:
        return None
    rows, heads, width = parts[0].rows, parts[0].heads, parts[0].width
    n, scores = rows[-1], len(rows) + 3  # so many dimensions
    if axis not in (-1, scores - 1):
        return None
    mixing = () if before is None or after is None else (before, after)
    if (before is None) != (after is None) or any(one.shape != (heads, heads) for one in mixing):
        return None
    if (
        width % LANES
        or (mixing and heads > _MOST_MIXED)
        or wiring.inner_shape(last.output[0]) != (*rows, heads * width)
    ):
        return None
    if bias is not None:
        bias = prepared_bias(bias, heads, n, rows[:-1])
        if mixing or bias is None:
            return None
    if factor.size == 1:
        return _Form(tuple(parts), None, float(factor.reshape(())) / math.log(2), bias, mixing, last)
    if factor.shape[-3:] != (heads, n, n) or factor.size != heads * n * n:
        return None
    return _Form(tuple(parts), factor.reshape(heads, n, n), 1.0, bias, mixing, last)


def _scores(
    softmax: NodeProto, wiring: _Wiring
) -> tuple[str, str, NDArray[Any], NDArray[Any] | None, NDArray[Any] | None] | None:
    """(Q, Kᵀ, M or the scale, the bias or None, the mixing or None) of what goes into this Softmax."""
    import numpy as np

    name, before = softmax.input[0], None
    mixed = _unmixed(name, wiring)
    if mixed is not None:
        before, name = mixed
    one = np.ones((), np.float32)
    bias, name = wiring.constant_and_other(name, "Add") or (None, name)
    factor, name = wiring.constant_and_other(name, "Mul") or (one, name)
    product = wiring.product(wiring.maker.get(name))
    if product is None or factor.dtype != np.float32 or (bias is not None and bias.dtype != np.float32):
        return None
    query, key = product
    scale, unscaled = wiring.constant_and_other(query, "Mul") or (one, query)
    if scale.size == 1 and scale.dtype == np.float32:  # of Q alone, before the product
        factor, query = factor * scale.reshape(()), unscaled
    return query, key, factor, bias, before


def _output(softmax: NodeProto, wiring: _Wiring) -> tuple[str, NodeProto, NDArray[Any] | None] | None:
    """(V, the node that puts heads side by side again, the mixing or None)."""
    weights, after = softmax.output[0], None
    flat = wiring.only_reader(softmax, "Reshape")
    if flat is not None:
        back = wiring.only_reader(wiring.only_reader(flat, "MatMul"), "Reshape")
        mixed = _unmixed(back.output[0], wiring) if back is not None else None
        if back is None or mixed is None or mixed[1] != weights:
            return None
        after, weights = mixed[0], back.output[0]
    taker = wiring.only_reader(wiring.maker[weights], "MatMul")
    product = wiring.product(taker)
    transpose = wiring.only_reader(taker, "Transpose")
    last = wiring.only_reader(transpose, "Reshape")
    if product is None or product[0] != weights or transpose is None or last is None:
        return None
    return (product[1], last, after) if _order(transpose) in _HEADS_APART else None


def _unmixed(name: str, wiring: _Wiring) -> tuple[NDArray[Any], str] | None:
    """Reshape(W @ Reshape(x))  →  (Wᵀ, x): heads mixed by one product."""
    import numpy as np

    outer = wiring.made_by(name, "Reshape")
    product = wiring.made_by(outer.input[0], "MatMul") if outer is not None else None
    weights = wiring.constant(product.input[0]) if product is not None else None
    inner = wiring.made_by(product.input[1], "Reshape") if product is not None else None
    if outer is None or weights is None or inner is None or weights.ndim != 2 or weights.dtype != np.float32:
        return None
    flat, apart = wiring.constant(inner.input[1]), wiring.constant(outer.input[1])
    # (B, H, n, n) → (B, H, n²) → back
    if flat is None or apart is None or flat.size != 3 or apart.size != 4 or flat[1] != apart[1]:
        return None
    return np.ascontiguousarray(weights.T), inner.input[0]


def _part(name: str, orders: tuple[list[int], ...], wiring: _Wiring) -> _Part | None:
    """Transpose(Reshape(x)), or of one of equal parts of a Split along the columns."""
    transpose = wiring.made_by(name, "Transpose")
    reshape = wiring.made_by(transpose.input[0], "Reshape") if transpose is not None else None
    apart = wiring.constant(reshape.input[1]) if reshape is not None else None
    if transpose is None or reshape is None or apart is None or _order(transpose) not in orders:
        return None
    *rows, heads, width = (int(one) for one in apart[1:])
    source, column, whole = reshape.input[0], 0, heads * width
    split = wiring.made_by(source, "Split")
    if split is not None:
        axis = next((one.i for one in split.attribute if one.name == "axis"), 0)
        if axis not in (len(rows) + 1, -1) or len(split.input) > 1:
            return None
        column = list(split.output).index(source) * heads * width
        source, whole = split.input[0], len(split.output) * heads * width
    return _Part(source, column, tuple(rows), heads, width) if wiring.inner_shape(source) == (*rows, whole) else None


def _order(transpose: NodeProto) -> list[int]:
    return next((list(one.ints) for one in transpose.attribute if one.name == "perm"), [])
