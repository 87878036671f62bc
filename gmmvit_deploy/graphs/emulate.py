"""Rewrite bfloat16 nodes as float32 nodes whose results are rounded to bfloat16.

A runtime that cannot compute in bfloat16 can run the rewritten graph. `runtimes/programs/emulated_precision.py` runs
the rewritten graph in ONNX Runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmmvit_deploy.graphs.weights import without_weights
from gmmvit_deploy.graphs.wiring import rewrite_graph

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["without_bfloat16"]


def without_bfloat16(proto: ModelProto) -> ModelProto:
    """Return a graph in which float32 nodes replace the bfloat16 nodes, and Cast nodes round the results to bfloat16.

    A graph without bfloat16 constants is returned unchanged.
    """
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper, shape_inference

    if not any(constant.data_type == TensorProto.BFLOAT16 for constant in proto.graph.initializer):
        return proto
    out = shape_inference.infer_shapes(without_weights(proto), strict_mode=True)
    rounded = {value.name for value in out.graph.value_info if value.type.tensor_type.elem_type == TensorProto.BFLOAT16}
    nodes = []
    for node in out.graph.node:
        names = [name for name in node.output if name in rounded]
        sources = {name: f"{name}.exact" for name in names}
        if names and node.op_type == "Cast":
            sources = {names[0]: node.input[0]}
        else:
            outputs = [sources.get(name, name) for name in node.output]
            del node.output[:]
            node.output.extend(outputs)
            nodes.append(node)
        for name, source in sources.items():
            nodes += [
                helper.make_node("Cast", [source], [f"{name}.bf16"], name=f"{name}/round", to=TensorProto.BFLOAT16),
                helper.make_node("Cast", [f"{name}.bf16"], [name], name=f"{name}/widen", to=TensorProto.FLOAT),
            ]
    constants = [
        numpy_helper.from_array(numpy_helper.to_array(constant).astype(np.float32), constant.name)
        if constant.data_type == TensorProto.BFLOAT16
        else constant
        for constant in proto.graph.initializer
    ]
    rewrite_graph(out.graph, nodes, constants)
    return out
