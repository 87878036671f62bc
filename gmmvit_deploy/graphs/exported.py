"""Simplify the graph of another package's network: with onnxscript, without loss of scalars, and without copies.

onnxscript takes some scalars for neutral elements:

    x + c, x − c        onnxscript removes the operation if |c| is at most 1e-8, such as the 1e-9 of x / (1e-9 + Σ x)
    x · f, x / f        onnxscript removes the operation if |f − 1| is at most 1e-5

Removing x + 0 and x · 1 changes nothing. Removing x + 1e-9 turns 0 / (0 + 1e-9) into 0 / 0. onnxscript compares only
scalars without dimensions. Before the optimisation, each such scalar that is not exactly neutral becomes a tensor with
the shape (1,), which onnxscript keeps and which computes the same numbers.

Networks of other packages compute position tables, relative indices and rotations from large constants in every forward
pass. onnxscript computes them once, but for operators with several outputs, such as the Split of a table of rotary
positions. `fold_constants` evaluates those that only move values. `folded.constant_nodes` refuses what is left.

`remove_no_ops` removes nodes that only copy a tensor, so that the logits stay the same bit for bit:

    Pad      without padding: Swin pads every image to whole windows, also if the image already has whole windows
    Reshape  to the shape that the tensor has: transformers does so after each fused attention call
    Expand   before an elementwise operator, if the operator broadcasts the tensor to the same shape: x / Expand(norm)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from gmmvit_deploy.graphs.declared import SHAPE_OPERATORS
from gmmvit_deploy.graphs.wiring import add_constant, remove_unused, values_of

if TYPE_CHECKING:
    import onnx_ir as ir

_NEUTRAL = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0}
_NEAR = {"Add": 2e-8, "Sub": 2e-8, "Mul": 2e-5, "Div": 2e-5}
"""Operator → twice the largest distance from the neutral element at which onnxscript removes the operator."""
_MOVES = SHAPE_OPERATORS | {"GatherND"}
_MAX_ELEMENTS = 2**28  # 1 GiB of float32
_BROADCASTING = frozenset({"Add", "Div", "Mul", "Sub"})


def optimize_exactly(model: ir.Model) -> None:
    """Optimise the graph with onnxscript in place, without loss of scalars.

    model: of the program that ``torch.onnx.export`` returns with ``optimize=False``, in which several values can have
    the same name. Each gets its own name, as a ModelProto needs.
    """
    from onnx_ir.passes.common import NameFixPass
    from onnxscript import optimizer

    NameFixPass()(model)
    # A scalar can be the result of constant nodes, such as a cast, or be inside a function of the graph.
    optimizer.inline(model)
    optimizer.fold_constants(model, onnx_shape_inference=True)
    _keep_scalars(model.graph)
    optimizer.optimize(model)


def _keep_scalars(graph: Any) -> None:
    """Give each nearly neutral scalar the shape (1,), unless the result has no dimensions: it would get the shape."""
    kept: dict[tuple[str, float], ir.Value] = {}
    for node in graph.all_nodes():
        shape = node.outputs[0].shape
        if node.domain or node.op_type not in _NEUTRAL or (shape is not None and not len(shape)):
            continue
        for index, value in enumerate(node.inputs):
            scalar = None if value is None else _nearly_neutral(value, node.op_type)
            if scalar is None:
                continue
            key = (scalar.dtype.name, float(scalar))
            if key not in kept:
                kept[key] = add_constant(graph, f"nearly_neutral/{len(kept)}", scalar.reshape(1))
            node.replace_input_with(index, kept[key])


def _nearly_neutral(value: Any, operator: str) -> NDArray[Any] | None:
    """Return the floating-point scalar that the value holds, if it is near the neutral element but not equal to it."""
    import onnx_ir as ir

    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or len(tensor.shape) or not tensor.dtype.is_floating_point():
        return None
    scalar = tensor.numpy()
    return scalar if 0 < abs(float(scalar) - _NEUTRAL[operator]) <= _NEAR[operator] else None


def fold_constants(model: ir.Model) -> None:
    """Store every computable constant as an initializer, in place.  Names and metadata of the other nodes stay."""
    from onnxscript import optimizer

    while True:
        optimizer.fold_constants(
            model, onnx_shape_inference=False, input_size_limit=_MAX_ELEMENTS, output_size_limit=_MAX_ELEMENTS
        )
        remove_unused(model)
        moves = [node for node in model.graph if node.op_type in _MOVES and _reads_constants_only(node)]
        if not moves:
            return
        for node in moves:
            _fold_move(model.graph, node)


def _reads_constants_only(node: ir.Node) -> bool:
    read = [value for value in node.inputs if value is not None]
    return bool(read) and all(value.is_initializer() for value in read)


def _fold_move(graph: ir.Graph, node: ir.Node) -> None:
    """Replace a node that only moves constants by its results."""
    import onnx_ir as ir
    from onnx.helper import make_empty_tensor_value_info, make_graph
    from onnx.reference import ReferenceEvaluator

    read = [value for value in node.inputs if value is not None]
    feeds = {str(value.name): value.const_value.numpy() for value in read if value.const_value is not None}
    proto = ir.to_proto(node)
    inputs, outputs = ([make_empty_tensor_value_info(name) for name in names] for names in (feeds, proto.output))
    alone = make_graph([proto], "move", inputs, outputs)
    results = ReferenceEvaluator(alone, opsets=dict(graph.opset_imports)).run(None, feeds)
    for output, values in zip(node.outputs, results, strict=True):
        output.replace_all_uses_with(add_constant(graph, str(output.name), values))
    graph.remove(node, safe=True)


def remove_no_ops(model: ir.Model) -> None:
    """Remove nodes that only copy a tensor, and what only they read, in place."""
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
