"""Nearly neutral scalars stay in an optimised graph, neutral scalars are removed, constants are computed once."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from gmmvit_deploy.graphs.exported import fold_constants, optimize_exactly
from gmmvit_deploy.graphs.folded import constant_nodes
from tests.graphs.small_graphs import graph, operators, run
from tests.timm_graphs import exported

X = np.random.default_rng(0).uniform(1, 2, (2, 3)).astype(np.float32)


def optimized(proto: onnx.ModelProto) -> onnx.ModelProto:
    model = ir.from_proto(proto)
    optimize_exactly(model)
    return ir.to_proto(model)


@pytest.mark.parametrize(
    ("operator", "scalar"), [("Add", 1e-9), ("Add", -1e-8), ("Sub", 1e-9), ("Mul", 1.000005), ("Div", 0.999995)]
)
@pytest.mark.parametrize("kind", ["initializer", "constant", "cast"])
def test_a_nearly_neutral_scalar_stays(operator: str, scalar: float, kind: str) -> None:
    tiny = np.float32(1e-9)
    body = f"scaled = Mul(x, tiny) y = {operator}(scaled, c)"  # x + 1e-9 differs from x only for a small x
    if kind == "initializer":
        proto = graph(body, tiny=tiny, c=np.float32(scalar))
    elif kind == "constant":
        proto = graph(f"c = Constant<value_float = {scalar:.7f}>() {body}", tiny=tiny)
        proto.graph.node[0].attribute[0].f = scalar
    else:
        proto = graph(f"c = Cast<to = 1>(wide) {body}", tiny=tiny, wide=np.float64(scalar))
    short = optimized(proto)
    assert operators(short) == ["Mul", operator]
    assert [list(constant.dims) for constant in short.graph.initializer] in ([[], [1]], [[1], []])
    np.testing.assert_array_equal(run(short, X), run(proto, X))
    assert not np.array_equal(run(short, X), X * tiny)


@pytest.mark.parametrize(("operator", "neutral"), [("Add", 0.0), ("Sub", 0.0), ("Mul", 1.0), ("Div", 1.0)])
def test_a_neutral_scalar_is_removed(operator: str, neutral: float) -> None:
    proto = graph(f"shifted = {operator}(x, c) y = Relu(shifted)", c=np.float32(neutral))
    assert operators(optimized(proto)) == ["Relu"]


def test_values_with_the_same_name() -> None:
    """PyTorch's exporter names a buffer ``mean`` and the result of ReduceMean alike."""
    body = "sum = Add(x, mean) average = ReduceMean(sum, axes) y = Add(average, c)"
    constants = {"mean": np.float32([1, 2, 3]), "c": np.float32(1e-9), "axes": np.array([1])}
    model = ir.from_proto(graph(body, y="batch, 1", **constants))
    model.graph.node(1).outputs[0].name = "mean"
    optimize_exactly(model)
    short = ir.to_proto(model)
    assert operators(short) == ["Add", "ReduceMean", "Add"]
    np.testing.assert_allclose(run(short, X), (X + np.float32([1, 2, 3])).mean(1, keepdims=True), rtol=1e-6)


@pytest.mark.integration
def test_the_table_of_rotary_positions_becomes_constants() -> None:
    proto = exported("eva02")
    assert constant_nodes(proto.graph) == ["model/Split (Split)"]
    model = ir.from_proto(proto)
    fold_constants(model)
    folded = ir.to_proto(model)
    assert constant_nodes(folded.graph) == []
    onnx.checker.check_model(folded, full_check=True)
    table = next(tensor for tensor in proto.graph.initializer if tensor.name == "network.rope.pos_embed")
    sin, cos = np.split(numpy_helper.to_array(table), 2, axis=1)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in folded.graph.initializer}
    np.testing.assert_array_equal(stored["split_split_0"], sin)
    np.testing.assert_array_equal(stored["split_split_1"], cos)
    assert table.name not in stored
