"""Roles of nodes: what families declare, and what is inferred from the operators of other networks."""

from __future__ import annotations

from collections import Counter

import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.graphs.cast import cast_graph
from gmmvit_deploy.graphs.declared import declare
from gmmvit_deploy.graphs.guessed_roles import guessed_roles
from gmmvit_deploy.graphs.roles import attentions_of, require_known_roles, roles_of
from gmmvit_deploy.inference.precision import ROLES, Precision, Role
from tests.conftest import RELEASED
from tests.golden_files import each_export
from tests.graphs import small_graphs
from tests.timm_graphs import exported


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


def test_a_graph_without_declared_roles_is_accepted() -> None:
    """The operators of a graph from another exporter compute in float32 in every precision."""
    (role,) = roles_of(small_graphs.graph("y = HardSwish(x)").graph).values()
    assert role == "head"  # of the node that outputs the logits
    graph = small_graphs.graph("t = HardSwish(x) y = Relu(t)").graph
    assert list(roles_of(graph).values()) == ["unknown", "head"]
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
