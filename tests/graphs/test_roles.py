"""Roles of nodes: what families declare, and what is inferred from the operators of other networks."""

from __future__ import annotations

from collections import Counter

import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.graphs.cast import cast_graph
from gmmvit_deploy.graphs.declared import ROLE_KEY, declare
from gmmvit_deploy.graphs.guessed_roles import guessed_roles
from gmmvit_deploy.graphs.roles import attentions_of, require_known_roles, roles_of
from gmmvit_deploy.inference.precision import PRECISIONS, ROLES, Precision, Role
from tests.conftest import RELEASED
from tests.golden_files import each_export
from tests.graphs import small_graphs
from tests.timm_graphs import exported


def roles_by_name(graph: ir.Graph) -> dict[str | None, Role]:
    return {node.name: role for node, role in roles_of(graph).items()}


@pytest.mark.parametrize(
    ("before", "after", "known"),
    [("product", "product", True), ("projection", "product", False), ("product", "projection", False)],
)
def test_a_declared_attention_is_known_by_the_products_around_its_softmax(
    before: Role, after: Role, known: bool
) -> None:
    graph = small_graphs.graph("s = MatMul(x, x) p = Softmax(s) y = MatMul(p, x)", x="b, 2, 2").graph
    for node, role in zip(graph, (before, "softmax", after), strict=True):
        declare(node, role, attention="a")
    (attention,) = attentions_of(graph)
    assert attention.known == known
    assert attention.nodes == (("s", "p", "y") if known else ("p",))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_an_unknown_operator_computes_in_float32(precision: Precision) -> None:
    model = cast_graph(small_graphs.graph("t = Tanh(x) y = Softmax(t)"), precision)
    inferred = onnx.shape_inference.infer_shapes(ir.to_proto(model), strict_mode=True)
    types = {value.name: value.type.tensor_type.elem_type for value in inferred.graph.value_info}
    assert types["t"] == TensorProto.FLOAT


def test_a_declared_role_that_no_policy_has_is_refused() -> None:
    graph = small_graphs.graph("y = Add(x, x)").graph
    graph.node("y").metadata_props[ROLE_KEY] = "ornament"
    with pytest.raises(ExportError, match=r"node y: expected one of the roles input, embedding.*got 'ornament'"):
        roles_of(graph)


@pytest.mark.parametrize("name", each_export(RELEASED))
def test_what_families_declare_is_what_the_rules_see(name: str, tensor_bundles: dict[str, Bundle]) -> None:
    graph = ir.load(tensor_bundles[name].onnx_path).graph
    roles, attentions = roles_of(graph), attentions_of(graph)
    assert set(roles.values()) <= set(ROLES)
    pools_early = name.startswith("vit") and name != "vit_plain"  # vit_plain has a class token
    assert Counter(roles.values())["head"] == (2 if pools_early else 1)
    for node in graph:
        node.metadata_props.clear()
    guessed = {node: role for node, role in roles_of(graph).items() if role != "unknown"}
    assert guessed == {node: role for node, role in roles.items() if node in guessed}
    assert attentions_of(graph) == attentions


# ---- operators without a known role --------------------------------------------------------------------------------


def chain_of(*operators: tuple[str, str, Role | None]) -> ir.Graph:
    """Return a chain of nodes; each operator is (name of the node, operator, declared role or None)."""
    names = ["x", *(f"t{index}" for index in range(1, len(operators))), "y"]
    body = " ".join(
        f"{name} = {operator}({read})"
        for read, name, (_, operator, _) in zip(names, names[1:], operators, strict=False)
    )
    graph = small_graphs.graph(body).graph
    for node, (name, _, role) in zip(graph, operators, strict=True):
        node.name = name
        if role is not None:
            declare(node, role)
    return graph


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
    assert roles_by_name(graph)["act/HardSwish"] == "head"  # the node that outputs the logits
    graph = chain_of(("act/HardSwish", "HardSwish", None), ("head/Relu", "Relu", None))
    assert roles_by_name(graph)["act/HardSwish"] == "unknown"
    require_known_roles(graph, "fp16", what="m")


# ---- timm's architectures --------------------------------------------------------------------------------------------


OUTSIDE_THE_POLICY = {
    "resnet": {"MaxPool"},
    "convnext": {"Range"},
    "mobilenet": {"HardSigmoid", "HardSwish", "Mul"},  # Mul: a gate whose activation is HardSigmoid
}
"""Test model → operators of the nodes without a known role; every other test model has no such node: tests/export
converts some to fp16, which an unknown role would stop.
"""


@pytest.mark.first(1)
@pytest.mark.integration
@pytest.mark.parametrize("name", ["map_pooling", "swin", "rope", *OUTSIDE_THE_POLICY])
def test_every_node_has_a_role_except_operators_outside_the_policy(name: str) -> None:
    graph = exported(name).graph
    roles = guessed_roles(graph)
    assert set(roles) == set(graph)
    assert {node.op_type for node in graph if roles[node] == "unknown"} == OUTSIDE_THE_POLICY.get(name, set())
    softmaxes = sum(node.op_type == "Softmax" for node in graph)
    assert [attention.known for attention in attentions_of(graph)] == [True] * softmaxes
