"""Graphs of a few nodes from ``x`` to ``y``, run by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper


def graph(
    nodes: Sequence[onnx.NodeProto], x: tuple[object, ...], y: tuple[object, ...] | None = None, **constants: object
) -> onnx.ModelProto:
    """Return a graph in which every computed tensor has a declared shape.  x, y: shapes; y is that of x by default."""
    value = helper.make_tensor_value_info
    proto = helper.make_model(
        helper.make_graph(
            list(nodes),
            "g",
            [value("x", TensorProto.FLOAT, x)],
            [value("y", TensorProto.FLOAT, y or x)],
            [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
        ),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=10,
    )
    return onnx.shape_inference.infer_shapes(proto, data_prop=True)


def run(proto: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def operators(proto: onnx.ModelProto) -> list[str]:
    onnx.checker.check_model(proto, full_check=True)
    return [node.op_type for node in proto.graph.node]
