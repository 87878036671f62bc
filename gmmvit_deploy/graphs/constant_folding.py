"""Compute the nodes of a graph whose inputs are all constants, with the optimiser of onnxscript.

The exporter folds only small constants. Networks of other packages compute position tables, relative indices and
rotations from larger constants in every forward pass; after this step the graph holds the results.

The optimiser leaves a Split with several outputs in the graph, such as that of a table of rotary positions.
`fold_constant_moves` evaluates the nodes whose operators only move values, so the graph computes the same logits bit
for bit. Arithmetic on constants is left to the optimiser, and `proof.constant_nodes` refuses what is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmmvit_deploy.graphs.declared import SHAPE_OPERATORS
from gmmvit_deploy.graphs.wiring import copy_of, rewrite_graph

if TYPE_CHECKING:
    import onnx_ir as ir
    from onnx import ModelProto, TensorProto

_MOVES = SHAPE_OPERATORS | {"GatherND"}
_MAX_ELEMENTS = 2**28  # 1 GiB of float32


def without_constant_nodes(model: ir.Model) -> ir.Model:
    """Return the graph with every computable constant stored as an initializer.  Names and metadata of nodes stay."""
    import onnx_ir as ir
    from onnxscript import optimizer

    while True:
        optimizer.fold_constants(
            model, onnx_shape_inference=False, input_size_limit=_MAX_ELEMENTS, output_size_limit=_MAX_ELEMENTS
        )
        optimizer.remove_unused_nodes(model)
        # A conversion copies the weights.
        if not any(node.op_type in _MOVES and _reads_constants_only(node) for node in model.graph):
            return model
        model = ir.from_proto(fold_constant_moves(ir.to_proto(model)))


def _reads_constants_only(node: ir.Node) -> bool:
    read = [value for value in node.inputs if value is not None]
    return bool(read) and all(value.is_initializer() for value in read)


def fold_constant_moves(proto: ModelProto) -> ModelProto:
    """Return the graph with constants in place of the nodes that only move constants, or ``proto`` without such."""
    from onnx import helper, numpy_helper
    from onnx.reference import ReferenceEvaluator

    constants: dict[str, TensorProto] = {constant.name: constant for constant in proto.graph.initializer}
    kept = []
    for index, node in enumerate(proto.graph.node):
        inputs = [name for name in node.input if name]
        if node.op_type not in _MOVES or not inputs or not all(name in constants for name in inputs):
            kept.append(index)
            continue
        outputs = [helper.make_empty_tensor_value_info(name) for name in node.output]
        alone = helper.make_graph([node], "constants", [], outputs, [constants[name] for name in dict.fromkeys(inputs)])
        model = helper.make_model(alone, opset_imports=proto.opset_import, ir_version=proto.ir_version)
        for name, values in zip(node.output, ReferenceEvaluator(model).run(None, {}), strict=True):
            constants[name] = numpy_helper.from_array(values, name)
    if len(kept) == len(proto.graph.node):
        return proto
    out = copy_of(proto)
    rewrite_graph(out.graph, [out.graph.node[index] for index in kept], constants.values(), keep_shapes=True)
    return out
