"""A graph that declares the role ``unknown`` for an operator exists in float32 only."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper

from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.graphs.declared import declare
from gmmvit_deploy.graphs.roles import require_known_roles, roles_of
from gmmvit_deploy.precision import PRECISIONS, Precision, Role


def graph_of(*operators: tuple[str, str, Role | None]) -> onnx.GraphProto:
    """Return a chain of nodes; each operator is (name of the node, operator, declared role or None)."""
    value = helper.make_tensor_value_info
    nodes = []
    for index, (name, operator, role) in enumerate(operators):
        node = helper.make_node(operator, [f"t{index}"], [f"t{index + 1}"], name=name)
        nodes.append(node if role is None else declare(node, role))
    last = f"t{len(operators)}"
    return helper.make_graph(
        nodes, "g", [value("t0", TensorProto.FLOAT, ["b", 4])], [value(last, TensorProto.FLOAT, ["b", 4])]
    )


OUTSIDE = graph_of(
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
    graph = graph_of(("act/HardSwish", "HardSwish", None))
    assert roles_of(graph)["act/HardSwish"] == "head"  # the node that outputs the logits
    graph = graph_of(("act/HardSwish", "HardSwish", None), ("head/Relu", "Relu", None))
    assert roles_of(graph)["act/HardSwish"] == "unknown"
    require_known_roles(graph, "fp16", what="m")
