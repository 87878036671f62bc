"""Replace the nodes and constants of a graph in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, TensorProto

__all__ = ["rewrite_graph"]


def rewrite_graph(graph: GraphProto, nodes: Iterable[NodeProto], constants: Iterable[TensorProto]) -> None:
    """Replace a graph's nodes and constants, and delete the inferred data types and shapes of its tensors.

    The inferred data types and shapes may be wrong for the new nodes.
    """
    # The arguments are copied first, because they may be the graph's own lists, which ``del`` empties.
    new_nodes, new_constants = list(nodes), list(constants)
    del graph.node[:], graph.initializer[:], graph.value_info[:]
    graph.node.extend(new_nodes)
    graph.initializer.extend(new_constants)
