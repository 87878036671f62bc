from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from gmmvit_deploy.runtimes.engines.graph_source import source_from_onnx


@pytest.mark.parametrize(
    ("count", "unjudged"),
    [
        (1, "n0: Tanh has no role in the precision policy"),
        (3, "n0: Tanh, n1: Tanh, n2: Tanh have no role in the precision policy"),
        (5, "n0: Tanh, n1: Tanh, n2: Tanh and 2 more have no role in the precision policy"),
    ],
)
def test_up_to_three_operators_without_a_role_are_named(count: int, unjudged: str, tmp_path: Path) -> None:
    tensors = ["x", *(f"t{index}" for index in range(count)), "y"]
    nodes = [helper.make_node("Tanh", [tensors[i]], [tensors[i + 1]], name=f"n{i}") for i in range(count)]
    nodes.append(helper.make_node("Softmax", [tensors[count]], ["y"], name="p"))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", 4]) for name in ("x", "y")]
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:])), path)
    assert source_from_onnx(path).unjudged == unjudged
