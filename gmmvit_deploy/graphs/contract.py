"""Check that a graph is the network of a bundle: a single input, the stated outputs, and operators that come to an end.

A bundle can come from a stranger, with the right hashes for every file. A graph that an export wrote never has a loop,
and holds all of its weights, or reads them from the bundle's file for them. A runtime, however, runs a loop of 2⁶³
rounds without a way to stop it, and reads the weights of a graph from any file that the graph names.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir
    from google.protobuf.message import Message

_LOOPS = ("Loop", "Scan")
_MAX_LEVELS = 8
"""The maximum depth of graphs inside nodes. Exports write none."""


def file_problem(path: Path, *, input_name: str, outputs: Sequence[str], data: str = "") -> str:
    """Return the first difference of a file from the contract of a bundle's graph; empty if there is no difference.

    input_name: the name of the network's input.  outputs: the names of the network's outputs.
    data: the name of the file of the bundle that holds weights of this graph, or "" if the graph holds them.
    """
    import onnx
    import onnx_ir as ir
    from onnx.external_data_helper import uses_external_data

    logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # it warns of tensors that no node computes, as runtimes do
    try:
        proto = onnx.load(path, load_external_data=False)
        model = ir.from_proto(proto)
    except Exception as exc:  # onnx and onnx_ir raise exceptions of any class for a malformed file
        cause: BaseException = exc
        while cause.__cause__ is not None:
            cause = cause.__cause__
        return f"the file is not an ONNX graph: {cause}"
    graph = model.graph
    inputs = [str(value.name) for value in graph.inputs if not value.is_initializer()]
    if inputs != [input_name]:
        return f"expected the input {input_name}, got {_listed(inputs)}"
    names = [str(value.name) for value in graph.outputs]
    if names != list(outputs):
        return f"expected the outputs {_listed(outputs)}, got {_listed(names)}"
    for value in (*graph.inputs, *graph.outputs):
        if problem := _type_problem(value):
            return f"{problem} of {value.name}"
    for tensor in _tensors(proto):  # onnx_ir would keep only the last of those with the same name
        location = {entry.key: entry.value for entry in tensor.external_data}.get("location")
        if uses_external_data(tensor) and (not data or location != data):
            place = f"in the graph or in {data}" if data else "in the graph"
            return f"expected all weights {place}, got the tensor {tensor.name!r} in another file"
    for node, level in _nodes([*graph, *(node for function in model.functions.values() for node in function)]):
        if node.op_type in _LOOPS:
            return f"expected no loop, got the operator {node.op_type} ({node.name or 'without a name'})"
        if level > _MAX_LEVELS:
            return f"expected at most {_MAX_LEVELS} levels of graphs inside operators"
    return ""


def _tensors(message: Message) -> Iterator[onnx.TensorProto]:
    """Yield all tensors of a model: of graphs inside nodes, and of attributes, too."""
    import onnx

    if isinstance(message, onnx.TensorProto):
        yield message
        return
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for inner in value if isinstance(value, Sequence) else (value,):
                yield from _tensors(inner)


def _type_problem(value: ir.Value) -> str:
    import onnx_ir as ir

    if not isinstance(value.type, ir.TensorType):
        return f"expected a tensor, got {value.type} as the type"
    shape = value.shape
    # A runtime infers a shape that is not stated.
    if shape is not None and (len(shape) < 2 or any(isinstance(size, int) and size < 1 for size in shape)):
        return f"expected a batch and sizes from 1, got {shape} as the shape"
    return ""


def _nodes(nodes: Iterable[ir.Node]) -> Iterator[tuple[ir.Node, int]]:
    """Yield each node with its level, and the nodes of the graphs inside nodes, down to a level above the maximum."""
    waiting = [(node, 0) for node in nodes]
    while waiting:
        node, level = waiting.pop()
        yield node, level
        if level <= _MAX_LEVELS:
            waiting += [(inner, level + 1) for graph in _graphs(node) for inner in graph]


def _graphs(node: ir.Node) -> Iterator[ir.Graph]:
    import onnx_ir as ir

    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) or "none"
