"""Rewrite the attention of an exported graph to a layout with channels first, which needs no copies between products.

    as exported      [Q K V] = x [W_q W_k W_v]       a Split and Transposes copy Q, K and V into heads
    channels first   Qᵀ = W_qᵀ xᵀ, Kᵀ = …, Vᵀ = …    the result is (head, d, token): a Reshape splits it into heads
                     S = (Qᵀ)ᵀ Kᵀ    Oᵀ = Vᵀ Pᵀ    out = (Oᵀ)ᵀ W

The remaining Transposes are inputs of matrix products, and ONNX Runtime fuses such a Transpose into the product. The
rewritten graph is mathematically equal: every sum has the same terms. OpenVINO and TensorRT do not recognise the
rewritten attention, so that they cannot fuse it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gmmvit_deploy.graphs.rewrite import rewrite_graph
from gmmvit_deploy.graphs.wiring import Wiring

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto, NodeProto

__all__ = ["channels_first"]


def channels_first(proto: ModelProto) -> int:
    """Change the graph in place.  Parts of the graph that do not have the form of our export stay unchanged.

    Returns the number of changed splits into heads: three for each attention layer.
    """
    graph = _Graph(proto)
    transposes = [node for node in proto.graph.node if node.op_type == "Transpose"]
    changed = sum(graph.cut_into_heads(node) for node in transposes)
    for node in [node for node in proto.graph.node if node.op_type == "MatMul"]:
        graph.mix_transposed(node)
    graph.finish()
    return changed


class _Graph:
    """A graph during the change, and the wiring of the graph before the change."""

    def __init__(self, proto: ModelProto) -> None:
        self._graph = proto.graph
        self._wiring = Wiring(proto.graph)
        self._turned: dict[str, str] = {}
        """Value → the value with the last two dimensions swapped, which all nodes share."""
        self._uncopied: dict[str, str] = {}
        """Value of heads (…, H, N, d) that a Transpose computes → the Transpose's input (…, H, d, N)."""

    def cut_into_heads(self, transpose: NodeProto) -> bool:
        """Replace a projection, a Split, a Reshape and this Transpose by a product that computes transposed heads.

        The Split may be missing. Returns whether the graph had this form and was changed.
        """
        order = list(transpose.attribute[0].ints)
        rank = len(order)
        keys = [*range(rank - 3), rank - 2, rank - 1, rank - 3]
        reshape = self._only_from(transpose.input[0], "Reshape")
        if rank < 4 or order not in (_heads_first(rank), keys) or reshape is None:
            return False
        projection = self._projection(reshape.input[0])
        shape = self._wiring.array(reshape.input[1])
        if projection is None or shape is None:
            return False
        source, weight, bias = projection
        *outer, tokens, heads, head_dim = map(int, shape)
        if heads * head_dim != weight.shape[1] or len(outer) > 1:
            return False
        if source not in self._turned:
            self._turned[source] = self._add("Transpose", [source], perm=_swapped(rank - 1))
        product = self._add("MatMul", [self._new_constant(weight.T), self._turned[source]])
        if bias is not None:
            product = self._add("Add", [product, self._new_constant(bias[:, None])])
        cut = self._new_constant(np.array([*outer, heads, head_dim, tokens], np.int64))
        result = self._forget(transpose)
        if order == keys:
            self._add("Reshape", [product, cut], output=result)
        else:
            self._uncopied[result] = self._add("Reshape", [product, cut])
            self._add("Transpose", [self._uncopied[result]], output=result, perm=_swapped(rank))
        return True

    def mix_transposed(self, product: NodeProto) -> None:
        """Replace the product of weights and V, a Transpose and a Reshape by Vᵀ weightsᵀ, a Reshape and a Transpose."""
        values = self._uncopied.get(product.input[1])
        transpose = self._wiring.only_reader(product.output[0], "Transpose")
        if values is None or transpose is None:
            return
        reshape = self._wiring.only_reader(transpose.output[0], "Reshape")
        rank = len(transpose.attribute[0].ints)
        if reshape is None or list(transpose.attribute[0].ints) != _heads_first(rank):
            return
        shape = self._wiring.array(reshape.input[1])
        if shape is None:
            return
        *outer, tokens, width = map(int, shape)
        weights = self._add("Transpose", [product.input[0]], perm=_swapped(rank))
        mixed = self._add("MatMul", [values, weights])
        joined = self._new_constant(np.array([*outer, width, tokens], np.int64))
        flat = self._add("Reshape", [mixed, joined])
        self._add("Transpose", [flat], output=self._forget(reshape), perm=_swapped(rank - 1))

    def finish(self) -> None:
        """Remove the nodes that no output depends on, and sort the others in topological order."""
        made = Wiring(self._graph).maker
        ordered: list[NodeProto] = []
        seen: set[str] = set()
        waiting = [(output.name, False) for output in self._graph.output]
        while waiting:
            name, ready = waiting.pop()
            node = made.get(name)
            if node is None or (name in seen and not ready):
                continue
            if ready:
                ordered.append(node)
            else:
                seen.update(node.output)
                waiting.append((name, True))
                waiting += [(taken, False) for taken in node.input]
        taken = {name for node in ordered for name in node.input}
        rewrite_graph(self._graph, ordered, (tensor for tensor in self._graph.initializer if tensor.name in taken))

    def _projection(self, name: str) -> tuple[str, NDArray[Any], NDArray[Any] | None] | None:
        """Return (input, weight (D, H·d), bias or None) of the projection that computes a value.

        If the value is an output of a Split of the projection, weight and bias are the parts for this output. Returns
        None if no projection computes the value.
        """
        node = self._wiring.maker.get(name)
        part, parts = 0, 1
        if node is not None and node.op_type == "Split":
            part, parts = list(node.output).index(name), len(node.output)
            node = self._wiring.maker.get(node.input[0])
        bias = None
        if node is not None and node.op_type == "Add":
            bias = self._wiring.array(node.input[1])
            node = self._wiring.maker.get(node.input[0]) if bias is not None else None
        weight = self._wiring.array(node.input[1]) if node is not None and node.op_type == "MatMul" else None
        if node is None or weight is None or weight.ndim != 2 or weight.shape[1] % parts:
            return None
        width = weight.shape[1] // parts
        columns = slice(part * width, (part + 1) * width)
        return node.input[0], weight[:, columns], None if bias is None else bias[columns]

    def _only_from(self, name: str, kind: str) -> NodeProto | None:
        """Return the node of type ``kind`` that computes this value, if the value has a single reader, else None."""
        return self._wiring.made_by(name, kind) if self._wiring.only_reader(name) is not None else None

    def _new_constant(self, values: NDArray[Any]) -> str:
        from onnx import numpy_helper

        name = f"channels_first.constant.{len(self._graph.initializer)}"
        self._graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def _add(self, kind: str, inputs: list[str], *, output: str = "", **attributes: Any) -> str:
        from onnx import helper

        name = f"channels_first.{len(self._graph.node)}"
        output = output or name
        self._graph.node.append(helper.make_node(kind, inputs, [output], name=f"{name}/{kind}", **attributes))
        return output

    def _forget(self, node: NodeProto) -> str:
        """Rename the output of a node, and return the old name, so that another node can use the old name."""
        name = node.output[0]
        node.output[0] = f"{name}.before"
        return name


def _heads_first(rank: int) -> list[int]:
    """Return the permutation (…, N, H, d) → (…, H, N, d).  The permutation is its own inverse."""
    return [*range(rank - 3), rank - 2, rank - 3, rank - 1]


def _swapped(rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]
