"""Roles of the nodes of timm's architectures, inferred from the graph: which nodes have a role."""

from __future__ import annotations

import pytest

from gmmvit_deploy.graphs.guessed_roles import guessed_roles
from gmmvit_deploy.graphs.roles import attentions_of
from tests.timm_graphs import exported

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
