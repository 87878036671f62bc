"""Nodes that only copy a tensor are removed, and every other Pad and Expand stays."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from gmmvit_deploy.graphs.no_ops import without_no_ops
from tests.graphs.small_graphs import graph, operators, run

X = np.random.default_rng(0).standard_normal((2, 3, 4), dtype=np.float32)
SHAPE = "batch, 3, 4"
NORM = "norm = ReduceL2(x, axes) sizes = Shape(x) expanded = Expand(norm, sizes)"
CONSTANTS = {
    "axes": np.array([-1]),
    "none": np.zeros(6, np.int64),
    "one": np.array([0, 0, 0, 0, 0, 1]),
    "same": np.array([0, 3, 4]),
    "turned": np.array([0, 4, 3]),
}


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("padded = Pad(x, none) y = Relu(padded)", ["Relu"]),
        ("same_shape = Reshape(x, same) y = Relu(same_shape)", ["Relu"]),
        *((f"{NORM} y = {operator}(x, expanded)", ["ReduceL2", operator]) for operator in ("Div", "Mul", "Add", "Sub")),
    ],
)
def test_a_node_that_only_copies_is_removed(body: str, left: list[str]) -> None:
    proto = graph(body, x=SHAPE, **CONSTANTS)
    proto.graph.value_info.append(helper.make_tensor_value_info("expanded", TensorProto.FLOAT, ("batch", 3, 4)))
    short = without_no_ops(proto)
    assert operators(short) == left
    assert [constant.name for constant in short.graph.initializer] == (["axes"] if "ReduceL2" in left else [])
    np.testing.assert_array_equal(run(short, X), run(proto, X))


@pytest.mark.parametrize(
    ("body", "y"),
    [
        ("y = Pad(x, one)", "batch, 3, 5"),
        ("y = Pad(x, none)", SHAPE),  # the output of the graph
        ("turned_shape = Reshape(x, turned) y = Relu(turned_shape)", "batch, 4, 3"),
        (f"{NORM} y = Softmax(expanded)", SHAPE),  # not elementwise
        (f"{NORM} y = Mul(expanded, expanded)", SHAPE),
        (f"{NORM} y = Div(norm, expanded)", SHAPE),  # the result has another shape
    ],
)
def test_every_other_node_stays(body: str, y: str) -> None:
    proto = graph(body, x=SHAPE, y=y, **CONSTANTS)
    assert without_no_ops(proto) is proto
