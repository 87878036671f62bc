"""Rewrite how a graph cuts a stacked projection into Q, K and V, so that all attentions have the same form.

A linear map computes Q, K and V together, as a tensor X (B, n, P · H · d) with P = 3 (or P = 2 for K and V), H heads
and head dim d. timm first splits X into heads, and then selects Q, K and V. The families of this project first select
Q, K and V, and then split each tensor into heads:

    timm      Reshape (B, n, P, H, d), Transpose (P, B, H, n, d), a Slice and Squeeze, or a Gather, for each of Q, K, V
    rewritten Split of the last dimension, Reshape (B, n, H, d), Transpose (B, H, n, d)

In an attention inside windows, the first dimension B holds the w windows of each image. Some of these attentions
reshape Q, K and V to (B / w, w, H, n, d). The rewritten graph then reshapes X to (B / w, w, n, P · H · d) before the
Split, and merges the heads of the attention's output in the same way. Every node only moves values, so the rewritten
graph computes the same logits bit for bit.

`inference.matcher` and the fused attentions of engines expect the rewritten form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gmmvit_deploy.graphs.wiring import Wiring, attribute_of, copy_of, order_of, rewrite_graph

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto

_PICK_FIRST = [2, 0, 3, 1, 4]
"""(B, n, P, H, d) → (P, B, H, n, d)"""
_SPLIT_HEADS = {4: [0, 2, 1, 3], 5: [0, 1, 3, 2, 4]}
"""Rank → the permutation (B, …, n, H, d) → (B, …, H, n, d).  Each permutation is its own inverse."""
_TURN_KEYS = {4: [0, 1, 3, 2], 5: [0, 1, 2, 4, 3]}
"""Rank → the permutation (B, …, H, n, d) → (B, …, H, d, n)."""
_SPLIT_AND_TURN = {4: [0, 2, 3, 1], 5: [0, 1, 3, 4, 2]}
"""Rank → both permutations together: (B, …, n, H, d) → (B, …, H, d, n)."""


@dataclass(frozen=True, slots=True)
class _Pick:
    """Q, K or V, (B, H, n, d), the part ``index`` of X, and the nodes that pick it."""

    index: int
    output: str
    nodes: tuple[NodeProto, ...]


@dataclass(frozen=True, slots=True)
class _Stack:
    """A stacked projection X, ``source``, its sizes n, P, H and d, the first two nodes after it, and Q, K and V."""

    source: str
    sizes: tuple[int, int, int, int]
    reshape: NodeProto
    transpose: NodeProto
    picks: tuple[_Pick, ...]


def split_stacked_projections(proto: ModelProto) -> ModelProto:
    """Return the graph with every stacked projection in the rewritten form, or ``proto`` if no node needs a change.

    New nodes carry the metadata of the nodes that they replace. The shapes of new tensors are declared.
    """
    wiring = Wiring(proto.graph)
    stacks = {
        node.name: stack for node in proto.graph.node if (stack := _stack(node, wiring)) is not None
    }  # by the name of the Transpose
    if not stacks:
        return proto
    out = copy_of(proto)
    _Rewrite(out, stacks).run()
    return out


def _stack(transpose: NodeProto, wiring: Wiring) -> _Stack | None:
    """Return the stacked projection that this Transpose splits into heads, or None."""
    from onnx import TensorProto

    if transpose.op_type != "Transpose" or order_of(transpose) != _PICK_FIRST:
        return None
    reshape = wiring.made_by(transpose.input[0], "Reshape")
    target = _numbers(reshape.input[1], wiring) if reshape is not None else []
    if reshape is None or len(target) != 5 or min(target[1:]) < 1:
        return None
    _, n, parts, heads, head_dim = target
    if wiring.inner_shape(reshape.input[0]) != (n, parts * heads * head_dim):
        return None
    if wiring.element_type(reshape.input[0]) != TensorProto.FLOAT:
        return None  # a graph is rewritten before the graph is cast
    picks: list[_Pick] = []
    for reader in wiring.readers.get(transpose.output[0], []):
        pick = _pick(reader, wiring)
        if pick is None:
            return None
        picks.append(pick)
    return _Stack(reshape.input[0], (n, parts, heads, head_dim), reshape, transpose, tuple(picks)) if picks else None


def _pick(node: NodeProto, wiring: Wiring) -> _Pick | None:
    if node.op_type == "Gather" and attribute_of(node, "axis", 0) == 0:
        index = wiring.array(node.input[1])
        return None if index is None or index.ndim else _Pick(int(index), node.output[0], (node,))
    if node.op_type != "Slice" or len(node.input) < 4:
        return None
    squeeze = wiring.only_reader(node.output[0], "Squeeze")
    start, end, axes, *steps = (_numbers(name, wiring) for name in node.input[1:] if name)
    if squeeze is None or len(squeeze.input) < 2 or _numbers(squeeze.input[1], wiring) != [0]:
        return None
    if axes != [0] or len(start) != 1 or start[0] < 0 or end != [start[0] + 1] or any(step != [1] for step in steps):
        return None
    return _Pick(start[0], squeeze.output[0], (node, squeeze))


class _Rewrite:
    """Replaces the nodes of stacked projections in ``proto``."""

    def __init__(self, proto: ModelProto, stacks: dict[str, _Stack]) -> None:
        self._graph = proto.graph
        self._stacks = stacks
        self._wiring = Wiring(proto.graph)
        self._names = {node.name for node in proto.graph.node}
        self._gone: set[str] = set()
        self._constants: dict[str, TensorProto] = {}
        self._values: list[ValueInfoProto] = []

    def run(self) -> None:
        made = {name: self._split(stack) for name, stack in self._stacks.items()}
        for node in self._graph.node:
            made.update(self._merge(node))
        nodes: list[NodeProto] = []
        for node in self._graph.node:
            nodes += made.get(node.name, [] if node.name in self._gone else [node])
        rewrite_graph(self._graph, nodes, [*self._graph.initializer, *self._constants.values()], keep_shapes=True)
        self._graph.value_info.extend(self._values)

    def _split(self, stack: _Stack) -> list[NodeProto]:
        """Return new nodes in place of the Transpose, and mark the replaced nodes."""
        n, parts, heads, head_dim = stack.sizes
        windows = self._windows(stack)
        inner = (n,) if windows is None else (windows, n)
        rank = len(inner) + 3
        source, nodes = stack.source, []
        if windows is not None:
            source = f"{stack.transpose.output[0]}.windows"
            nodes.append(self._reshape(stack.reshape, stack.source, source, (*inner, parts * heads * head_dim)))
        pieces = [f"{stack.transpose.output[0]}.part{index}" for index in range(parts)]
        nodes.append(self._node("Split", [source], pieces, like=stack.reshape, axis=rank - 2, num_outputs=parts))
        for piece in pieces:
            self._declare(piece, (*inner, heads * head_dim))
        for pick in stack.picks:
            output, order = pick.output, _SPLIT_HEADS[rank]
            self._gone.update(node.name for node in pick.nodes)
            if windows is not None:
                apart = self._wiring.only_reader(output, "Reshape")
                output = self._drop(apart, output)
            turned = self._wiring.only_reader(output, "Transpose")
            if turned is not None and order_of(turned) == _TURN_KEYS[rank]:
                output, order = self._drop(turned, output), _SPLIT_AND_TURN[rank]
            apart_heads = f"{output}.heads"
            nodes.append(self._reshape(stack.reshape, pieces[pick.index], apart_heads, (*inner, heads, head_dim)))
            nodes.append(self._node("Transpose", [apart_heads], [output], like=stack.transpose, perm=order))
        if len(self._wiring.readers[stack.reshape.output[0]]) == 1:
            self._gone.add(stack.reshape.name)
        return nodes

    def _drop(self, node: NodeProto | None, otherwise: str) -> str:
        """Mark a node as replaced and return its output; without a node, return ``otherwise``."""
        if node is None:
            return otherwise
        self._gone.add(node.name)
        return str(node.output[0])

    def _windows(self, stack: _Stack) -> int | None:
        """Return w if the only reader of each of Q, K and V is a Reshape to (B / w, w, H, n, d), else None."""
        n, _, heads, head_dim = stack.sizes
        views: set[int] = set()
        for pick in stack.picks:
            view = self._wiring.only_reader(pick.output, "Reshape")
            target = _numbers(view.input[1], self._wiring) if view is not None else []
            if len(target) != 5 or target[1] < 1 or target[2:] != [heads, n, head_dim]:
                return None
            views.add(target[1])
        return views.pop() if len(views) == 1 else None

    def _merge(self, flat: NodeProto) -> dict[str, list[NodeProto]]:
        """Return replaced node → the new nodes that merge the heads of an attention with windows.

        (B / w, w, H, n, d) → (B, H, n, d) → (B, n, H, d) → (B, n, H · d)   in the graph: flat, turned, merged
        (B / w, w, H, n, d) → (B / w, w, n, H, d) → (B / w, w, n, H · d) → (B, n, H · d)   rewritten
        """
        product = self._wiring.made_by(flat.input[0], "MatMul") if flat.op_type == "Reshape" else None
        shape = self._wiring.inner_shape(flat.input[0]) if product is not None else None
        turned = self._wiring.only_reader(flat.output[0], "Transpose")
        merged = self._wiring.only_reader(turned.output[0], "Reshape") if turned is not None else None
        if shape is None or len(shape) != 4 or turned is None or merged is None or order_of(turned) != _SPLIT_HEADS[4]:
            return {}
        windows, heads, n, head_dim = shape
        if _numbers(flat.input[1], self._wiring)[1:] != [heads, n, head_dim]:
            return {}
        if _numbers(merged.input[1], self._wiring)[1:] != [n, heads * head_dim]:
            return {}
        self._gone.update((flat.name, turned.name))
        apart, together = f"{merged.output[0]}.heads", f"{merged.output[0]}.windows"
        self._declare(apart, (windows, n, heads, head_dim))
        last = type(merged)()
        last.CopyFrom(merged)
        last.input[0] = together
        return {
            merged.name: [
                self._node("Transpose", [flat.input[0]], [apart], like=turned, perm=_SPLIT_HEADS[5]),
                self._reshape(merged, apart, together, (windows, n, heads * head_dim)),
                last,
            ]
        }

    def _reshape(self, like: NodeProto, tensor: str, output: str, inner: tuple[int, ...]) -> NodeProto:
        """Return a Reshape of ``tensor`` to (−1, *inner)."""
        from onnx import numpy_helper

        name = "reshape." + "x".join(map(str, inner))
        self._constants[name] = numpy_helper.from_array(np.array([-1, *inner], np.int64), name)
        self._declare(output, inner)
        return self._node("Reshape", [tensor, name], [output], like=like)

    def _node(
        self, operator: str, inputs: list[str], outputs: list[str], *, like: NodeProto, **attributes: Any
    ) -> NodeProto:
        """Return a node in the module of ``like``, with its metadata."""
        from onnx import helper

        name = stem = f"{like.name.rpartition('/')[0] or 'model'}/{operator}"
        count = 0
        while name in self._names:
            count += 1
            name = f"{stem}.{count}"
        self._names.add(name)
        node = helper.make_node(operator, inputs, outputs, name=name, **attributes)
        node.metadata_props.extend(like.metadata_props)
        return node

    def _declare(self, tensor: str, inner: tuple[int, ...]) -> None:
        """Declare a new float32 tensor (B, *inner) with an open first dimension."""
        from onnx import TensorProto, helper

        self._values.append(helper.make_tensor_value_info(tensor, TensorProto.FLOAT, [None, *inner]))


def _numbers(name: str, wiring: Wiring) -> list[int]:
    """Return the values of a constant vector, or an empty list for any other tensor."""
    values = wiring.array(name)
    return [] if values is None or values.ndim != 1 else [int(value) for value in values]
