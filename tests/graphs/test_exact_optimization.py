"""Nearly neutral scalars stay in an optimised graph, and neutral scalars are removed with their operators."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from gmmvit_deploy.graphs.exact_optimization import optimize_exactly
from tests.graphs import small_graphs
from tests.graphs.small_graphs import operators, run

X = np.random.default_rng(0).uniform(1, 2, (2, 3)).astype(np.float32)


def graph(*nodes: onnx.NodeProto, shape: tuple[object, ...] | None = None, **constants: object) -> onnx.ModelProto:
    return small_graphs.graph(nodes, ("batch", 3), shape, **constants)


def optimized(proto: onnx.ModelProto) -> onnx.ModelProto:
    model = ir.from_proto(proto)
    optimize_exactly(model)
    return ir.to_proto(model)


@pytest.mark.parametrize(
    ("operator", "scalar"), [("Add", 1e-9), ("Add", -1e-8), ("Sub", 1e-9), ("Mul", 1.000005), ("Div", 0.999995)]
)
@pytest.mark.parametrize("kind", ["initializer", "constant", "cast"])
def test_a_nearly_neutral_scalar_stays(operator: str, scalar: float, kind: str) -> None:
    wide, narrow = np.float64(scalar), np.float32(scalar)
    last = helper.make_node(operator, ["scaled", "c"], ["y"])
    scaled = helper.make_node("Mul", ["x", "tiny"], ["scaled"])  # x + 1e-9 differs from x only for a small x
    tiny = np.float32(1e-9)
    if kind == "initializer":
        proto = graph(scaled, last, tiny=tiny, c=narrow)
    elif kind == "constant":
        constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(narrow))
        proto = graph(constant, scaled, last, tiny=tiny)
    else:
        proto = graph(
            helper.make_node("Cast", ["wide"], ["c"], to=TensorProto.FLOAT), scaled, last, tiny=tiny, wide=wide
        )
    short = optimized(proto)
    assert operators(short) == ["Mul", operator]
    assert [list(constant.dims) for constant in short.graph.initializer] in ([[], [1]], [[1], []])
    np.testing.assert_array_equal(run(short, X), run(proto, X))
    assert not np.array_equal(run(short, X), X * tiny)


@pytest.mark.parametrize(("operator", "neutral"), [("Add", 0.0), ("Sub", 0.0), ("Mul", 1.0), ("Div", 1.0)])
def test_a_neutral_scalar_is_removed(operator: str, neutral: float) -> None:
    proto = graph(
        helper.make_node(operator, ["x", "c"], ["shifted"]),
        helper.make_node("Relu", ["shifted"], ["y"]),
        c=np.float32(neutral),
    )
    assert operators(optimized(proto)) == ["Relu"]


def test_values_with_the_same_name() -> None:
    """PyTorch's exporter names a buffer ``mean`` and the result of ReduceMean alike."""
    model = ir.from_proto(
        graph(
            helper.make_node("Add", ["x", "mean"], ["sum"]),
            helper.make_node("ReduceMean", ["sum", "axes"], ["average"]),
            helper.make_node("Add", ["average", "c"], ["y"]),
            shape=("batch", 1),
            mean=np.float32([1, 2, 3]),
            c=np.float32(1e-9),
            axes=np.array([1]),
        )
    )
    model.graph.node(1).outputs[0].name = "mean"
    optimize_exactly(model)
    short = ir.to_proto(model)
    assert operators(short) == ["Add", "ReduceMean", "Add"]
    np.testing.assert_allclose(run(short, X), (X + np.float32([1, 2, 3])).mean(1, keepdims=True), rtol=1e-6)
