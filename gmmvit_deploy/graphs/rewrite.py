"""Replace the nodes and constants of a graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, TensorProto

__all__ = ["rewrite_graph"]


def rewrite_graph(graph: GraphProto, nodes: Iterable[NodeProto], constants: Iterable[TensorProto]) -> None:
    """Replace a graph's nodes and constants in place, and delete the inferred types, which may no longer be correct."""
    new_nodes, new_constants = list(nodes), list(constants)  # copied first: the arguments may be the lists of the graph
    del graph.node[:], graph.initializer[:], graph.value_info[:]
    graph.node.extend(new_nodes)
    graph.initializer.extend(new_constants)
