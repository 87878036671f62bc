"""Remove nodes that copy a tensor without changing the logits of a graph.

    Pad      without padding: Swin pads every image to whole windows, also if the image already has whole windows
    Reshape  to the shape that the tensor has: transformers does so after each fused attention call
    Expand   before an elementwise operator, if the operator broadcasts the tensor to the same shape: x / Expand(norm)

The rewritten graph computes the same logits bit for bit. A runtime executes these operators as copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmmvit_deploy.graphs.wiring import remove_unused, values_of

if TYPE_CHECKING:
    import onnx_ir as ir

_BROADCASTING = frozenset({"Add", "Div", "Mul", "Sub"})


def remove_no_ops(model: ir.Model) -> None:
    """Remove these nodes, and what only they read, in place."""
    for node in model.graph:
        (source, *_), output = node.inputs or (None,), node.outputs[0]
        copies = _pads_nothing(node) or _keeps_shape(node) or _only_broadcasts(node)
        if copies and source is not None and not output.is_graph_output():
            output.replace_all_uses_with(source)
    remove_unused(model)


def _pads_nothing(node: ir.Node) -> bool:
    pads = values_of(node.inputs[1]) if node.op_type == "Pad" else None
    return pads is not None and not pads.any()


def _keeps_shape(node: ir.Node) -> bool:
    return node.op_type == "Reshape" and _same_shape(node.inputs[0], node.outputs[0])


def _only_broadcasts(node: ir.Node) -> bool:
    if node.op_type != "Expand":
        return False
    output = node.outputs[0]
    for reader in output.consumers():
        others = [value for value in reader.inputs if value is not output]
        if reader.op_type not in _BROADCASTING or len(others) != 1 or not _same_shape(others[0], output):
            return False
    return True


def _same_shape(first: ir.Value | None, second: ir.Value) -> bool:
    shape = second.shape
    return first is not None and shape is not None and not shape.has_unknown_dim() and first.shape == shape
