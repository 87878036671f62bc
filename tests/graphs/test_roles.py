from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.graphs.cast import cast_graph
from gmmvit_deploy.graphs.declared import ROLE_KEY, declare
from gmmvit_deploy.graphs.roles import attentions_of, require_known_roles, roles_of
from gmmvit_deploy.inference.precision import PRECISIONS, ROLES, Precision, Role
from tests.conftest import RELEASED
from tests.golden_files import each_export
from tests.graphs import small_graphs


def graph_of(*nodes: onnx.NodeProto) -> onnx.GraphProto:
    value = helper.make_tensor_value_info
    return helper.make_graph(
        list(nodes), "g", [value("x", TensorProto.FLOAT, ["b", 2, 2])], [value("y", TensorProto.FLOAT, ["b", 2, 2])]
    )


@pytest.mark.parametrize(
    ("before", "after", "known"),
    [("product", "product", True), ("projection", "product", False), ("product", "projection", False)],
)
def test_a_declared_attention_is_known_by_the_products_around_its_softmax(
    before: Role, after: Role, known: bool
) -> None:
    graph = graph_of(
        declare(helper.make_node("MatMul", ["x", "x"], ["s"], name="a/qk"), before, attention="a"),
        declare(helper.make_node("Softmax", ["s"], ["p"], name="a/Softmax"), "softmax", attention="a"),
        declare(helper.make_node("MatMul", ["p", "x"], ["y"], name="a/pv"), after, attention="a"),
    )
    (attention,) = attentions_of(graph)
    assert attention.known == known
    assert attention.nodes == (("a/qk", "a/Softmax", "a/pv") if known else ("a/Softmax",))


@pytest.mark.parametrize("divisor", ["sum", "add"])
def test_the_division_by_a_sum_is_a_norm(divisor: str) -> None:
    body = (
        f"p = Softmax<axis = 1>(x) sum = ReduceSum(p, axes) add = Add(e, sum) div = Div(p, {divisor}) y = Div(div, p)"
    )
    graph = small_graphs.graph(body, x="b, 2, 2", axes=np.array([2]), e=np.float32([1e-9])).graph
    norms = {name for name, role in roles_of(graph).items() if role == "norm"}
    assert norms == {"sum", "div", divisor}


ODD = (helper.make_node("Tanh", ["x"], ["t"], name="odd"), helper.make_node("Softmax", ["t"], ["y"], name="p"))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_an_unknown_operator_computes_in_float32(precision: Precision) -> None:
    model = helper.make_model(graph_of(*ODD), opset_imports=[helper.make_opsetid("", 20)])
    inferred = onnx.shape_inference.infer_shapes(cast_graph(model, precision), strict_mode=True)
    types = {value.name: value.type.tensor_type.elem_type for value in inferred.graph.value_info}
    assert types["t"] == TensorProto.FLOAT


def test_a_declared_role_holds_against_the_rules() -> None:
    """By the rules a sum of two computed values is a residual; this node declares a bias on the scores."""
    node = declare(helper.make_node("Add", ["x", "x"], ["s"], name="sum"), "score_bias")
    graph = graph_of(node, declare(helper.make_node("Identity", ["s"], ["y"], name="i"), "shape"))
    assert roles_of(graph) == {"sum": "score_bias", "i": "shape"}


def test_a_declared_role_that_no_policy_has_is_refused() -> None:
    node = helper.make_node("Add", ["x", "x"], ["y"], name="sum")
    node.metadata_props.add(key=ROLE_KEY, value="ornament")
    with pytest.raises(ExportError, match=r"node sum: expected one of the roles input, embedding.*got 'ornament'"):
        roles_of(graph_of(node))


@pytest.mark.parametrize("name", each_export(RELEASED))
def test_what_families_declare_is_what_the_rules_see(name: str, tensor_bundles: dict[str, Bundle]) -> None:
    graph = onnx.load(tensor_bundles[name].onnx_path).graph
    roles, attentions = roles_of(graph), attentions_of(graph)
    assert set(roles.values()) <= set(ROLES)
    pools_early = name.startswith("vit") and name != "vit_plain"  # vit_plain has a class token
    assert Counter(roles.values())["head"] == (2 if pools_early else 1)
    for node in graph.node:
        del node.metadata_props[:]
    guessed = {node: role for node, role in roles_of(graph).items() if role != "unknown"}
    assert guessed == {node: role for node, role in roles.items() if node in guessed}
    assert attentions_of(graph) == attentions


def test_a_number_for_each_head_is_a_scale_to_the_rules() -> None:
    """A learned temperature multiplies the scores of each head by one number; a mask multiplies each entry."""
    inputs = ", ".join(f"float[b, 2, 3, 3] {name}" for name in "qkv")
    graph = onnx.parser.parse_graph(
        f"""g ({inputs}) => (float[b, 2, 3, 3] y) <float[2, 1, 1] t = {{1, 2}}> {{
            s = MatMul(q, k)  m = Mul(s, t)  p = Softmax(m)  o = MatMul(p, v)  y = Identity(o)
        }}"""
    )
    for node in graph.node:
        node.name = node.output[0]
    assert roles_of(graph)["m"] == "scale"


# ---- operators without a known role --------------------------------------------------------------------------------


def chain_of(*operators: tuple[str, str, Role | None]) -> onnx.GraphProto:
    """Return a chain of nodes; each operator is (name of the node, operator, declared role or None)."""
    nodes = []
    for index, (name, operator, role) in enumerate(operators):
        last = index == len(operators) - 1
        node = helper.make_node(
            operator, [f"t{index}" if index else "x"], ["y" if last else f"t{index + 1}"], name=name
        )
        nodes.append(node if role is None else declare(node, role))
    return graph_of(*nodes)


OUTSIDE = chain_of(
    ("network.stem/Relu", "Relu", "activation"),
    ("network.stages.0.act/HardSwish.1", "HardSwish", "unknown"),
    ("network.stages.1.act/HardSwish", "HardSwish", "unknown"),
    ("network.head/Tanh", "Tanh", "unknown"),
)


@pytest.mark.parametrize("precision", [precision for precision in PRECISIONS if precision != "fp32"])
def test_the_first_operator_without_a_known_role_is_named(precision: Precision) -> None:
    with pytest.raises(ExportError) as error:
        require_known_roles(OUTSIDE, precision, what="runs/bundle")
    assert str(error.value) == (
        f"runs/bundle: {precision} needs a known role for each operator; node network.stages.0.act/HardSwish.1 has "
        "none; this model runs in fp32"
    )
    assert error.value.hint == (
        f"remove {precision} from the precisions; operators of this model without a known role: HardSwish, Tanh"
    )


def test_a_graph_without_declared_roles_is_accepted() -> None:
    """The operators of a graph from another exporter compute in float32 in every precision."""
    graph = chain_of(("act/HardSwish", "HardSwish", None))
    assert roles_of(graph)["act/HardSwish"] == "head"  # the node that outputs the logits
    graph = chain_of(("act/HardSwish", "HardSwish", None), ("head/Relu", "Relu", None))
    assert roles_of(graph)["act/HardSwish"] == "unknown"
    require_known_roles(graph, "fp16", what="m")
