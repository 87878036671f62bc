"""Evaluate the nodes of a graph that only move constants, such as a Split of a table of rotary positions.

The optimiser of onnxscript (`constant_folding`) leaves a Split with several outputs in the graph. This module evaluates
the nodes whose operators only move values, so the graph computes the same logits bit for bit. Arithmetic on constants
is left to the optimiser, and `proof.constant_nodes` refuses what is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmmvit_deploy.graphs.declared import SHAPE_OPERATORS
from gmmvit_deploy.graphs.rewrite import rewrite_graph

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

__all__ = ["fold_constant_moves"]

_MOVES = SHAPE_OPERATORS | {"GatherND"}


def fold_constant_moves(proto: ModelProto) -> ModelProto:
    """Return the graph with constants in place of the nodes that only move constants, or ``proto`` without such nodes.

    The declared shapes of computed tensors are kept.
    """
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
    out = type(proto)()
    out.CopyFrom(proto)
    nodes = [out.graph.node[index] for index in kept]
    read = {name for node in nodes for name in node.input} | {value.name for value in out.graph.output}
    computed = {name for node in nodes for name in node.output}
    values = [value for value in out.graph.value_info if value.name in computed]
    rewrite_graph(out.graph, nodes, [constant for name, constant in constants.items() if name in read])
    out.graph.value_info.extend(values)
    return out
