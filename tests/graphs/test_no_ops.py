"""Nodes that only copy a tensor are removed, and every other Pad and Expand stays."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from gmmvit_deploy.graphs.no_ops import without_no_ops
from tests.graphs import small_graphs
from tests.graphs.small_graphs import operators, run

X = np.random.default_rng(0).standard_normal((2, 3, 4), dtype=np.float32)


def graph(
    nodes: list[onnx.NodeProto], shape: tuple[object, ...] = ("batch", 3, 4), **constants: object
) -> onnx.ModelProto:
    return small_graphs.graph(nodes, ("batch", 3, 4), shape, **constants)


NORM = [
    helper.make_node("ReduceL2", ["x", "axes"], ["norm"]),
    helper.make_node("Shape", ["x"], ["sizes"]),
    helper.make_node("Expand", ["norm", "sizes"], ["expanded"]),
]
AXES = {"axes": np.array([-1])}


def test_removes_a_pad_without_padding() -> None:
    proto = graph(
        [helper.make_node("Pad", ["x", "pads"], ["padded"]), helper.make_node("Relu", ["padded"], ["y"])],
        pads=np.zeros(6, np.int64),
    )
    short = without_no_ops(proto)
    assert operators(short) == ["Relu"]
    assert not short.graph.initializer
    np.testing.assert_array_equal(run(short, X), run(proto, X))


@pytest.mark.parametrize("operator", ["Div", "Mul", "Add", "Sub"])
def test_removes_an_expand_that_the_next_operator_repeats(operator: str) -> None:
    proto = graph([*NORM, helper.make_node(operator, ["x", "expanded"], ["y"])], **AXES)
    proto.graph.value_info.append(helper.make_tensor_value_info("expanded", TensorProto.FLOAT, ("batch", 3, 4)))
    short = without_no_ops(proto)
    assert operators(short) == ["ReduceL2", operator]
    np.testing.assert_array_equal(run(short, X), run(proto, X))


@pytest.mark.parametrize(
    "proto",
    [
        graph([helper.make_node("Pad", ["x", "pads"], ["y"])], ("batch", 3, 5), pads=np.array([0, 0, 0, 0, 0, 1])),
        graph([helper.make_node("Pad", ["x", "pads"], ["y"])], pads=np.zeros(6, np.int64)),  # the output of the graph
        graph([*NORM, helper.make_node("Softmax", ["expanded"], ["y"])], **AXES),
        graph([*NORM, helper.make_node("Mul", ["expanded", "expanded"], ["y"])], **AXES),
        graph([*NORM, helper.make_node("Div", ["norm", "expanded"], ["y"])], **AXES),  # the result has another shape
    ],
    ids=["pads", "output", "no elementwise reader", "both operands", "smaller operand"],
)
def test_leaves_every_other_node(proto: onnx.ModelProto) -> None:
    assert without_no_ops(proto) is proto


@pytest.mark.parametrize(("sizes", "kept"), [((0, 3, 4), False), ((0, 4, 3), True)])
def test_removes_a_reshape_to_the_same_shape_only(sizes: tuple[int, ...], kept: bool) -> None:
    nodes = [helper.make_node("Reshape", ["x", "sizes"], ["same"]), helper.make_node("Relu", ["same"], ["y"])]
    proto = graph(nodes, ("batch", *sizes[1:]), sizes=np.array(sizes, np.int64))
    short = without_no_ops(proto)
    assert operators(short) == (["Reshape", "Relu"] if kept else ["Relu"])
    np.testing.assert_array_equal(run(short, X), run(proto, X))
