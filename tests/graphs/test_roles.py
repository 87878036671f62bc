from __future__ import annotations

from collections import Counter

import onnx
import pytest
from onnx import TensorProto, helper

from gmmvit_deploy.artifacts import Bundle
from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.graphs.roles import attentions_of, roles_of
from gmmvit_deploy.precision import POLICY, PRECISIONS
from tests.conftest import NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_node_of_every_family_has_a_role_in_the_policy(name: str, tensor_bundles: dict[str, Bundle]) -> None:
    graph = onnx.load(tensor_bundles[name].onnx_path).graph
    roles = roles_of(graph)
    assert set(roles) == {node.name for node in graph.node}
    assert set(roles.values()) - {"shape"} <= set(POLICY)
    pools_early = name.startswith("vit") and name != "vit_plain"  # vit_plain has a class token
    assert Counter(roles.values())["head"] == (2 if pools_early else 1)
    for kinds in POLICY.values():
        assert tuple(kinds) == PRECISIONS


@pytest.mark.parametrize("name", NAMES)
def test_attentions_are_found_under_the_names_of_their_modules(name: str, tensor_bundles: dict[str, Bundle]) -> None:
    bundle = tensor_bundles[name]
    found = attentions_of(onnx.load(bundle.onnx_path).graph)
    masks = {attention.name: attention.mask for attention in found if attention.mask}
    assert masks == {record.layer: record.constant for record in bundle.manifest.masks}
    assert all(attention.known for attention in found)
    assert {attention.mixes_heads for attention in found} == {name.startswith("cait")}
    for attention in found:
        assert attention.nodes[0].endswith("scores/MatMul")
        assert attention.nodes[-1].startswith(f"{attention.name}/MatMul")


def test_roles_of_one_block(tensor_bundles: dict[str, Bundle]) -> None:
    graph = onnx.load(tensor_bundles["swin_gmm"].onnx_path).graph
    roles = roles_of(graph)
    block = "stages.0.blocks.1"
    assert roles["patch_embedding/Conv"] == "embedding"
    assert roles[f"{block}.attention_norm/LayerNormalization"] == "norm"
    assert roles[f"{block}.attention.qkv/MatMul"] == "projection"
    assert roles[f"{block}.attention.qkv/Add"] == "bias"
    assert roles[f"{block}.attention.scores/MatMul"] == "product"
    assert roles[f"{block}.attention.scores.before.mask/Mul"] == "mask"
    assert roles[f"{block}.attention.scores.before.bias/Add"] == "score_bias"
    assert roles[f"{block}.attention/Softmax"] == "softmax"
    assert roles[f"{block}/Add"] == "residual"
    assert roles["head/Gemm"] == "head"


def graph_of(*nodes: onnx.NodeProto) -> onnx.GraphProto:
    value = helper.make_tensor_value_info
    return helper.make_graph(
        list(nodes),
        "g",
        [value("x", TensorProto.FLOAT, ["b", 2, 2])],
        [value("y", TensorProto.FLOAT, ["b", 2, 2])],
    )


def test_a_softmax_that_is_no_attention() -> None:
    graph = graph_of(
        helper.make_node("Tanh", ["x"], ["t"], name="t"),
        helper.make_node("Softmax", ["t"], ["p"], name="a/Softmax"),
        helper.make_node("Identity", ["p"], ["y"], name="i"),
    )
    with pytest.raises(ExportError, match="a/Softmax: a softmax between two products was wanted"):
        attentions_of(graph)
    (found,) = attentions_of(graph, strict=False)
    assert (found.name, found.known, found.nodes) == ("a", False, ("a/Softmax",))


def test_an_operator_without_a_place_in_the_policy() -> None:
    graph = graph_of(
        helper.make_node("Tanh", ["x"], ["t"], name="odd"),
        helper.make_node("Identity", ["t"], ["y"], name="i"),
    )
    with pytest.raises(ExportError, match="odd: Tanh has no place"):
        roles_of(graph)
