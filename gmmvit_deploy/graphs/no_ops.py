"""Remove nodes that copy a tensor without changing the logits of a graph.

    Pad      without padding: Swin pads every image to whole windows, also if the image already has whole windows
    Reshape  to the shape that the tensor has: transformers does so after each fused attention call
    Expand   before an elementwise operator, if the operator broadcasts the tensor to the same shape: x / Expand(norm)

The rewritten graph computes the same logits bit for bit. A runtime executes these operators as copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmmvit_deploy.graphs.wiring import Wiring, copy_of, rewrite_graph

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

_BROADCASTING = frozenset({"Add", "Div", "Mul", "Sub"})


def without_no_ops(proto: ModelProto) -> ModelProto:
    """Return the graph without these nodes and what only they read; ``proto`` itself if it has no such node."""
    wiring, shapes = Wiring(proto.graph), _shapes(proto.graph)
    outputs = {value.name for value in proto.graph.output}
    same: dict[str, str] = {}  # output of a removed node → the tensor that its readers read instead
    for node in proto.graph.node:
        if node.output[0] not in outputs and (
            _pads_nothing(node, wiring) or _keeps_shape(node, shapes) or _only_broadcasts(node, wiring, shapes)
        ):
            same[node.output[0]] = same.get(node.input[0], node.input[0])
    if not same:
        return proto
    out = copy_of(proto)
    read, kept = set(outputs), []
    for node in reversed(out.graph.node):
        if node.output[0] not in same and read.intersection(node.output):
            for index, name in enumerate(node.input):
                node.input[index] = same.get(name, name)
            read.update(node.input)
            kept.append(node)
    rewrite_graph(out.graph, reversed(kept), out.graph.initializer, keep_shapes=True)
    return out


def _pads_nothing(node: NodeProto, wiring: Wiring) -> bool:
    pads = wiring.array(node.input[1]) if node.op_type == "Pad" else None
    return pads is not None and not pads.any()


def _keeps_shape(node: NodeProto, shapes: dict[str, list[int | str]]) -> bool:
    shape = shapes.get(node.output[0]) if node.op_type == "Reshape" else None
    return shape is not None and "" not in shape and shapes.get(node.input[0]) == shape


def _only_broadcasts(node: NodeProto, wiring: Wiring, shapes: dict[str, list[int | str]]) -> bool:
    shape = shapes.get(node.output[0]) if node.op_type == "Expand" else None
    if not shape or "" in shape:
        return False
    for reader in wiring.readers.get(node.output[0], []):
        others = [name for name in reader.input if name != node.output[0]]
        if reader.op_type not in _BROADCASTING or len(others) != 1 or shapes.get(others[0]) != shape:
            return False
    return True


def _shapes(graph: GraphProto) -> dict[str, list[int | str]]:
    """Map a tensor to its declared dimensions: numbers or names; "" for an unknown dimension."""
    return {
        value.name: [dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.value_info)
        if value.type.tensor_type.HasField("shape")
    }
