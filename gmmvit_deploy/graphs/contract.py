"""Check that a graph is the network of a bundle: a single input, the stated outputs, and operators that come to an end.

A bundle can come from a stranger, with the right hashes for every file. A graph that an export wrote never has a loop,
and holds all of its weights, or reads them from the bundle's file for them. A runtime, however, runs a loop of 2⁶³
rounds without a way to stop it, and reads the weights of a graph from any file that the graph names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

_LOOPS = ("Loop", "Scan")
_MAX_LEVELS = 8
"""The maximum depth of graphs inside nodes. Exports write none."""


def graph_problem(model: ModelProto, *, input_name: str, outputs: Sequence[str], data: str = "") -> str:
    """Return the first difference from the contract of a bundle's graph; empty if there is no difference.

    input_name: the name of the network's input.  outputs: the names of the network's outputs.
    data: the name of the file of the bundle that holds weights of this graph, or "" if the graph holds them.
    """
    graph = model.graph
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [value.name for value in graph.input if value.name not in constants]
    if inputs != [input_name]:
        return f"expected the input {input_name}, got {_listed(inputs)}"
    names = [value.name for value in graph.output]
    if names != list(outputs):
        return f"expected the outputs {_listed(outputs)}, got {_listed(names)}"
    for value in (*graph.input, *graph.output):
        if problem := _shape_problem(value):
            return f"{problem} of {value.name}"
    for tensor in graph.initializer:
        if tensor.data_location == tensor.EXTERNAL and (not data or _location(tensor) != data):
            place = f"in the graph or in {data}" if data else "in the graph"
            return f"expected all weights {place}, got the tensor {tensor.name!r} in another file"
    for node, level in _nodes([*graph.node, *(node for function in model.functions for node in function.node)]):
        if node.op_type in _LOOPS:
            return f"expected no loop, got the operator {node.op_type} ({node.name or 'without a name'})"
        if level > _MAX_LEVELS:
            return f"expected at most {_MAX_LEVELS} levels of graphs inside operators"
    return ""


def _location(tensor: TensorProto) -> str:
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def _shape_problem(value: ValueInfoProto) -> str:
    if not value.type.HasField("tensor_type"):
        return f"expected a tensor, got {value.type.WhichOneof('value') or 'no type'} as the type"
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):  # runtimes infer the shape
        return ""
    shape = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in tensor.shape.dim]
    if len(shape) < 2 or any(isinstance(size, int) and size < 1 for size in shape):
        return f"expected a batch and sizes from 1, got {shape} as the shape"
    return ""


def _nodes(nodes: Iterable[NodeProto]) -> Iterator[tuple[NodeProto, int]]:
    """Yield each node with its level, and the nodes of the graphs inside nodes, down to a level above the maximum."""
    waiting = [(node, 0) for node in nodes]
    while waiting:
        node, level = waiting.pop()
        yield node, level
        if level <= _MAX_LEVELS:
            waiting += [(inner, level + 1) for graph in _graphs(node) for inner in graph.node]


def _graphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) or "none"
