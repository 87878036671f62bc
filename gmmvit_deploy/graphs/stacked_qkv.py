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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gmmvit_deploy.graphs.wiring import (
    add_constant,
    inner_shape,
    made_by,
    only_reader,
    order_of,
    remove_unused,
    values_of,
)

if TYPE_CHECKING:
    import onnx_ir as ir

_PICK_FIRST = [2, 0, 3, 1, 4]
"""(B, n, P, H, d) → (P, B, H, n, d)"""
_SPLIT_HEADS = {4: [0, 2, 1, 3], 5: [0, 1, 3, 2, 4]}
"""Rank → the permutation (B, …, n, H, d) → (B, …, H, n, d).  Each permutation is its own inverse."""
_TURN_KEYS = {4: [0, 1, 3, 2], 5: [0, 1, 2, 4, 3]}
"""Rank → the permutation (B, …, H, n, d) → (B, …, H, d, n)."""
_SPLIT_AND_TURN = {4: [0, 2, 3, 1], 5: [0, 1, 3, 4, 2]}
"""Rank → both permutations together: (B, …, n, H, d) → (B, …, H, d, n)."""


@dataclass(frozen=True, slots=True)
class _Stack:
    """A stacked projection X, ``source``, its sizes n, P, H and d, the first two nodes after it, and Q, K and V.

    picks: the index of a part of X, and the part, (B, H, n, d): Q, K or V.
    """

    source: ir.Value
    sizes: tuple[int, int, int, int]
    reshape: ir.Node
    transpose: ir.Node
    picks: tuple[tuple[int, ir.Value], ...]


def split_stacked_projections(model: ir.Model) -> None:
    """Write every stacked projection in the rewritten form, in place.

    New nodes carry the metadata of the nodes that they replace. The shapes of new tensors are declared.
    """
    nodes = list(model.graph)
    stacks = [stack for node in nodes if (stack := _stack(node)) is not None]
    if not stacks:
        return
    rewrite = _Rewrite(model.graph)
    for stack in stacks:
        rewrite.split(stack)
    for node in nodes:
        rewrite.merge(node)
    remove_unused(model)


def _stack(transpose: ir.Node) -> _Stack | None:
    """Return the stacked projection that this Transpose splits into heads, or None."""
    import onnx_ir as ir

    if transpose.op_type != "Transpose" or order_of(transpose) != _PICK_FIRST:
        return None
    reshape = made_by(transpose.inputs[0], "Reshape")
    target = _numbers(reshape.inputs[1]) if reshape is not None else []
    source = reshape.inputs[0] if reshape is not None else None
    if reshape is None or source is None or len(target) != 5 or min(target[1:]) < 1:
        return None
    _, n, parts, heads, head_dim = target
    # A graph is rewritten before the graph is cast.
    if inner_shape(source) != (n, parts * heads * head_dim) or source.dtype != ir.DataType.FLOAT:
        return None
    picks = [pick for reader, _ in transpose.outputs[0].uses() if (pick := _pick(reader)) is not None]
    if not picks or len(picks) != len(transpose.outputs[0].uses()):
        return None
    return _Stack(source, (n, parts, heads, head_dim), reshape, transpose, tuple(picks))


def _pick(node: ir.Node) -> tuple[int, ir.Value] | None:
    if node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0:
        index = values_of(node.inputs[1])
        return None if index is None or index.ndim else (int(index), node.outputs[0])
    if node.op_type != "Slice" or len(node.inputs) < 4:
        return None
    squeeze = only_reader(node.outputs[0], "Squeeze")
    start, end, axes, *steps = (_numbers(value) for value in node.inputs[1:] if value is not None)
    if squeeze is None or len(squeeze.inputs) < 2 or _numbers(squeeze.inputs[1]) != [0]:
        return None
    if axes != [0] or len(start) != 1 or start[0] < 0 or end != [start[0] + 1] or any(step != [1] for step in steps):
        return None
    return start[0], squeeze.outputs[0]


class _Rewrite:
    """Puts new nodes in place of those of stacked projections in ``graph``; the old ones are read by nothing then."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._names = {node.name for node in graph}

    def split(self, stack: _Stack) -> None:
        n, parts, heads, head_dim = stack.sizes
        windows = self._windows(stack)
        inner = (n,) if windows is None else (windows, n)
        rank = len(inner) + 3
        stem, source = stack.transpose.outputs[0].name, stack.source
        at = stack.transpose
        if windows is not None:
            source = self._reshape(at, stack.reshape, source, f"{stem}.windows", (*inner, parts * heads * head_dim))
        pieces = {f"{stem}.part{index}": (*inner, heads * head_dim) for index in range(parts)}
        split = self._node(at, "Split", [source], pieces, like=stack.reshape, axis=rank - 2, num_outputs=parts)
        for index, output in stack.picks:
            order = _SPLIT_HEADS[rank]
            if windows is not None and (view := only_reader(output, "Reshape")) is not None:
                output = view.outputs[0]
            turned = only_reader(output, "Transpose")
            if turned is not None and order_of(turned) == _TURN_KEYS[rank]:
                output, order = turned.outputs[0], _SPLIT_AND_TURN[rank]
            shape = (*inner, heads, head_dim)
            apart = self._reshape(at, stack.reshape, split.outputs[index], f"{output.name}.heads", shape)
            moved = self._node(at, "Transpose", [apart], {str(output.name): ()}, like=stack.transpose, perm=order)
            moved.outputs[0].shape = output.shape
            output.replace_all_uses_with(moved.outputs[0], replace_graph_outputs=True)

    def _windows(self, stack: _Stack) -> int | None:
        """Return w if the only reader of each of Q, K and V is a Reshape to (B / w, w, H, n, d), else None."""
        n, _, heads, head_dim = stack.sizes
        views: set[int] = set()
        for _, output in stack.picks:
            view = only_reader(output, "Reshape")
            target = _numbers(view.inputs[1]) if view is not None else []
            if len(target) != 5 or target[1] < 1 or target[2:] != [heads, n, head_dim]:
                return None
            views.add(target[1])
        return views.pop() if len(views) == 1 else None

    def merge(self, flat: ir.Node) -> None:
        """Merge the heads of an attention with windows with new nodes.

        (B / w, w, H, n, d) → (B, H, n, d) → (B, n, H, d) → (B, n, H · d)   in the graph: flat, turned, merged
        (B / w, w, H, n, d) → (B / w, w, n, H, d) → (B / w, w, n, H · d) → (B, n, H · d)   rewritten
        """
        source = flat.inputs[0] if flat.op_type == "Reshape" else None
        shape = inner_shape(source) if source is not None and made_by(source, "MatMul") is not None else None
        turned = only_reader(flat.outputs[0], "Transpose")
        merged = only_reader(turned.outputs[0], "Reshape") if turned is not None else None
        if source is None or shape is None or len(shape) != 4 or turned is None or merged is None:
            return
        windows, heads, n, head_dim = shape
        targets = [_numbers(node.inputs[1])[1:] for node in (flat, merged)]
        if order_of(turned) != _SPLIT_HEADS[4] or targets != [[heads, n, head_dim], [n, heads * head_dim]]:
            return
        stem, apart_heads = merged.outputs[0].name, (windows, n, heads, head_dim)
        apart = self._node(
            merged, "Transpose", [source], {f"{stem}.heads": apart_heads}, like=turned, perm=_SPLIT_HEADS[5]
        )
        inner = (windows, n, heads * head_dim)
        together = self._reshape(merged, merged, apart.outputs[0], f"{stem}.windows", inner)
        merged.replace_input_with(0, together)

    def _reshape(self, at: ir.Node, like: ir.Node, tensor: ir.Value, output: str, inner: tuple[int, ...]) -> ir.Value:
        """Return ``tensor`` with the shape (−1, *inner)."""
        name = "reshape." + "x".join(map(str, inner))
        shape = self._graph.initializers.get(name) or add_constant(self._graph, name, np.array([-1, *inner]))
        return self._node(at, "Reshape", [tensor, shape], {output: inner}, like=like).outputs[0]

    def _node(
        self,
        at: ir.Node,
        operator: str,
        inputs: list[ir.Value],
        outputs: Mapping[str, tuple[int, ...]],
        *,
        like: ir.Node,
        **attributes: Any,
    ) -> ir.Node:
        """Insert a node before ``at``, in the module of ``like``, with its metadata.

        outputs: the names of its float32 outputs (B, *inner) → inner.
        """
        import onnx_ir as ir

        name = stem = f"{(like.name or '').rpartition('/')[0] or 'model'}/{operator}"
        count = 0
        while name in self._names:
            count += 1
            name = f"{stem}.{count}"
        self._names.add(name)
        kind = ir.TensorType(ir.DataType.FLOAT)
        values = [ir.Value(name=key, shape=ir.Shape([None, *inner]), type=kind) for key, inner in outputs.items()]
        node = ir.node(
            operator, inputs, attributes, outputs=values, name=name, metadata_props=dict(like.metadata_props)
        )
        at.prepend(node)
        return node


def _numbers(value: ir.Value | None) -> list[int]:
    """Return the values of a constant vector, or an empty list for any other tensor."""
    values = values_of(value)
    return [] if values is None or values.ndim != 1 else [int(value) for value in values]
