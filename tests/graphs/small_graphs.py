"""Graphs of a few nodes from ``x`` to ``y``, run by ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import numpy_helper


def graph(body: str, *, x: str = "batch, 3", y: str = "", **constants: object) -> ir.Model:
    """Return a graph of float32 in which each node has the name of its output, and each computed tensor a shape.

    body: in the text syntax of ONNX, such as ``a = Relu(x) y = Add(a, c)``.  x, y: shapes; y is that of x by default.
    """
    head = f'<ir_version: 10, opset_import: ["": 20]> g (float[{x}] x) => (float[{y or x}] y)'
    proto = onnx.parser.parse_model(f"{head} {{ {body} }}")
    proto.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()
    )
    for node in proto.graph.node:
        node.name = node.output[0]
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto, data_prop=True))


def run(model: ir.Model, x: np.ndarray, *, exact: bool = False) -> np.ndarray:
    """Run a graph, with ``exact`` without ONNX Runtime's optimisations, which depend on the form of the graph."""
    options = onnxruntime.SessionOptions()
    if exact:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def operators(model: ir.Model) -> list[str]:
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    return [node.op_type for node in model.graph]


def stored(model: ir.Model) -> dict[str, np.ndarray]:
    """Map the name of each initializer to its values."""
    return {name: value.const_value.numpy() for name, value in model.graph.initializers.items() if value.const_value}
