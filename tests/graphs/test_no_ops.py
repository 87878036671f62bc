"""Nodes that only copy a tensor are removed, and every other Pad and Expand stays."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from gmmvit_deploy.graphs.no_ops import remove_no_ops
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
    model = graph(body, x=SHAPE, **CONSTANTS)
    for node in model.graph:
        if node.op_type == "Expand":
            node.outputs[0].shape = ir.Shape(["batch", 3, 4])
    before = run(model, X)
    remove_no_ops(model)
    assert operators(model) == left
    assert [*model.graph.initializers] == (["axes"] if "ReduceL2" in left else [])
    np.testing.assert_array_equal(run(model, X), before)


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
    model = graph(body, x=SHAPE, y=y, **CONSTANTS)
    before = operators(model)
    remove_no_ops(model)
    assert operators(model) == before
