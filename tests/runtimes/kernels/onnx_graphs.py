"""A graph with a masked attention, in the form of the exporter and in other forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEADS, N, WIDTH = 2, 20, 16


def graph(**other: Any) -> onnx.ModelProto:
    """Return a masked attention as the exporter writes it.  other: changes of the form."""
    d = other.get("d", WIDTH)
    kind = other.get("type", TensorProto.FLOAT)
    numpy_type = helper.tensor_dtype_to_np_dtype(kind)
    mask = np.random.default_rng(1).standard_normal(other.get("mask", (HEADS, N, N))).astype(numpy_type)
    windows = other.get("windows", [])
    constants = {
        "mask": mask,
        "apart": np.asarray([-1, *windows, N, HEADS, d]),
        "beside": np.asarray([-1, *windows, N, HEADS * d]),
        "scale": np.full(other.get("scale", ()), 0.25, numpy_type),
        "bias": np.random.default_rng(3).standard_normal(other.get("bias", ())).astype(numpy_type),
    }
    biased = [helper.make_node("Add", ["masked", "bias"], ["biased"])] if "bias" in other else []
    scaled = [helper.make_node("Mul", ["query", "scale"], ["scaled"])] if "scale" in other else []

    def turned(name: str, to: str, order: list[int]) -> onnx.NodeProto:
        inner = [place + len(windows) for place in order]
        return helper.make_node("Transpose", [name], [to], perm=[*range(1 + len(windows)), *inner])

    joined = bool(other.get("joined"))  # windows and heads in a single dimension, as in the int8 graphs of Swin
    if joined:
        constants["join"] = np.asarray([-1, windows[0] * HEADS, N, d])
        constants["part"] = np.asarray([-1, *other.get("parted", [windows[0], HEADS, N, d])])
        places = {"q": "query", "k": "key.joined", "v": "value"}
        turns = [
            *(turned(f"{name}.apart", f"{name}.turned", [2, 1, 3]) for name in places),
            *(helper.make_node("Reshape", [f"{name}.turned", "join"], [place]) for name, place in places.items()),
            helper.make_node("Transpose", ["key.joined"], ["key"], perm=[0, 1, 3, 2]),
        ]
    else:
        turns = [
            turned("q.apart", "query", [2, 1, 3]),
            turned("k.apart", "key", [2, 3, 1]),
            turned("v.apart", "value", [2, 1, 3]),
        ]
    parted = [helper.make_node("Reshape", ["mixed", "part"], ["parted"])] if joined else []
    nodes = [
        helper.make_node("Split", ["x"], ["q", "k", "v"], axis=2 + len(windows), num_outputs=3),
        *(helper.make_node("Reshape", [name, "apart"], [f"{name}.apart"]) for name in "qkv"),
        *turns,
        *scaled,
        helper.make_node("MatMul", ["scaled" if scaled else "query", "key"], ["scores"]),
        helper.make_node("Mul", ["mask", "scores"], ["masked"]),
        *biased,
        helper.make_node("Softmax", ["biased" if biased else "masked"], ["weights"], axis=other.get("axis", -1)),
        helper.make_node("MatMul", ["weights", "value"], ["mixed"]),
        *parted,
        turned("parted" if joined else "mixed", "back", [2, 1, 3]),
        helper.make_node("Reshape", ["back", "beside"], ["y"], name="last"),
        helper.make_node("Relu", ["y"], ["out"]),
    ]
    outputs = [helper.make_tensor_value_info("out", kind, ["batch", *windows, N, HEADS * d])]
    if other.get("weights_are_used"):
        nodes.append(helper.make_node("Relu", ["weights"], ["more"]))
        outputs.append(helper.make_tensor_value_info("more", kind, ["batch", *windows, HEADS, N, N]))
    shapes = {"x": 3 * HEADS * d, "q": HEADS * d, "k": HEADS * d, "v": HEADS * d, "y": HEADS * d}
    values = [helper.make_tensor_value_info(name, kind, ["batch", *windows, N, size]) for name, size in shapes.items()]
    first = helper.make_node("Identity", ["pixels"], ["x"])
    made = helper.make_graph(
        [first, *nodes],
        "attention",
        [helper.make_tensor_value_info("pixels", kind, ["batch", *windows, N, 3 * HEADS * d])],
        outputs,
        [numpy_helper.from_array(np.asarray(constant), name) for name, constant in constants.items()],
        value_info=[] if other.get("no_shapes") else values,
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
