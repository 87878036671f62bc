"""Graphs of a few nodes from ``x`` to ``y``, run by ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper


def graph(body: str, *, x: str = "batch, 3", y: str = "", **constants: object) -> onnx.ModelProto:
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
    return onnx.shape_inference.infer_shapes(proto, data_prop=True)


def run(proto: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def operators(proto: onnx.ModelProto) -> list[str]:
    onnx.checker.check_model(proto, full_check=True)
    return [node.op_type for node in proto.graph.node]
