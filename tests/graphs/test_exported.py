"""Nearly neutral scalars stay in an optimised graph, neutral scalars are removed, constants are computed once."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from gmmvit_deploy.graphs.exported import fold_constants, optimize_exactly
from gmmvit_deploy.graphs.folded import constant_nodes
from tests.graphs.small_graphs import graph, operators, run, stored
from tests.timm_graphs import exported

X = np.random.default_rng(0).uniform(1, 2, (2, 3)).astype(np.float32)


def optimized(model: ir.Model) -> ir.Model:
    short = model.clone()
    optimize_exactly(short)
    return short


@pytest.mark.parametrize(
    ("operator", "scalar"), [("Add", 1e-9), ("Add", -1e-8), ("Sub", 1e-9), ("Mul", 1.000005), ("Div", 0.999995)]
)
@pytest.mark.parametrize("kind", ["initializer", "constant", "cast"])
def test_a_nearly_neutral_scalar_stays(operator: str, scalar: float, kind: str) -> None:
    tiny = np.float32(1e-9)
    body = f"scaled = Mul(x, tiny) y = {operator}(scaled, c)"  # x + 1e-9 differs from x only for a small x
    if kind == "initializer":
        model = graph(body, tiny=tiny, c=np.float32(scalar))
    elif kind == "constant":
        model = graph(f"c = Constant<value_float = {scalar:.7f}>() {body}", tiny=tiny)
        model.graph[0].attributes["value_float"] = ir.AttrFloat32("value_float", scalar)
    else:
        model = graph(f"c = Cast<to = 1>(wide) {body}", tiny=tiny, wide=np.float64(scalar))
    short = optimized(model)
    assert operators(short) == ["Mul", operator]
    assert [values.shape for values in stored(short).values()] in ([(), (1,)], [(1,), ()])
    np.testing.assert_array_equal(run(short, X), run(model, X))
    assert not np.array_equal(run(short, X), X * tiny)


@pytest.mark.parametrize(("operator", "neutral"), [("Add", 0.0), ("Sub", 0.0), ("Mul", 1.0), ("Div", 1.0)])
def test_a_neutral_scalar_is_removed(operator: str, neutral: float) -> None:
    model = graph(f"shifted = {operator}(x, c) y = Relu(shifted)", c=np.float32(neutral))
    assert operators(optimized(model)) == ["Relu"]


def test_values_with_the_same_name() -> None:
    """PyTorch's exporter names a buffer ``mean`` and the result of ReduceMean alike."""
    body = "sum = Add(x, mean) average = ReduceMean(sum, axes) y = Add(average, c)"
    constants = {"mean": np.float32([1, 2, 3]), "c": np.float32(1e-9), "axes": np.array([1])}
    short = graph(body, y="batch, 1", **constants)
    short.graph.node(1).outputs[0].name = "mean"
    optimize_exactly(short)
    assert operators(short) == ["Add", "ReduceMean", "Add"]
    np.testing.assert_allclose(run(short, X), (X + np.float32([1, 2, 3])).mean(1, keepdims=True), rtol=1e-6)


@pytest.mark.integration
def test_the_table_of_rotary_positions_becomes_constants() -> None:
    model = exported("eva02")
    assert constant_nodes(model.graph) == ["model/Split (Split)"]
    table = stored(model)["network.rope.pos_embed"]
    fold_constants(model)
    assert constant_nodes(model.graph) == []
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    constants = stored(model)
    for index, values in enumerate(np.split(table, 2, axis=1)):
        np.testing.assert_array_equal(constants[f"split_split_{index}"], values)
    assert "network.rope.pos_embed" not in constants
