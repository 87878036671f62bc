"""Roles of the nodes of timm's architectures, inferred from the graph: which nodes have a role, and which role."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gmmvit_deploy.graphs.guessed_roles import guessed_attentions, guessed_roles
from gmmvit_deploy.inference.precision import Role
from tests.timm_graphs import exported

OUTSIDE_THE_POLICY = {
    "resnet": {"MaxPool"},
    "convnext": {"Range"},
    "mobilenet": {"HardSigmoid", "HardSwish", "Mul"},  # Mul: a gate whose activation is HardSigmoid
}
"""Test model → operators of the nodes without a known role; every other test model has no such node: tests/export
converts some to fp16, which an unknown role would stop.
"""
BLOCK = "network.blocks.0"


@pytest.mark.first(1)
@pytest.mark.integration
@pytest.mark.parametrize("name", ["map_pooling", "swin", "rope", *OUTSIDE_THE_POLICY])
def test_every_node_has_a_role_except_operators_outside_the_policy(name: str) -> None:
    graph = exported(name).graph
    roles = guessed_roles(graph)
    assert set(roles) == {node.name for node in graph.node}
    unknown = {node.op_type for node in graph.node if roles[node.name] == "unknown"}
    assert unknown == OUTSIDE_THE_POLICY.get(name, set())
    softmaxes = sum(node.op_type == "Softmax" for node in graph.node)
    assert [attention.known for attention in guessed_attentions(graph)] == [True] * softmaxes


@pytest.mark.first(3)
@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vit", {"network.patch_embed.proj/Conv": "embedding", f"{BLOCK}.attn.qkv/MatMul": "projection"}),
        ("registers", {f"{BLOCK}.attn.q_norm/LayerNormalization": "norm", f"{BLOCK}.ls1/Mul": "scale"}),
        ("map_pooling", {"network.attn_pool.q/MatMul": "projection", "network.attn_pool/Expand": "shape"}),
        ("deit_distilled", {"network.head/Gemm": "head", "network.head_dist/Gemm": "head", "network/Add.1": "head"}),
        (
            "clip",
            {
                f"{BLOCK}.mlp.act/Mul": "activation",
                f"{BLOCK}.mlp.act/Sigmoid": "activation",
                f"{BLOCK}.mlp.act/Mul.1": "activation",
            },
        ),
        ("swin_padded", {"network.layers.0.blocks.0/Pad": "shape", "network.layers.0.blocks.0.attn/Add": "score_bias"}),
        ("beit", {f"{BLOCK}/Mul": "scale", f"{BLOCK}.attn/Add": "bias", f"{BLOCK}.attn/Add.1": "score_bias"}),
        ("pit", {"network.transformers.1.pool.conv/Conv": "depthwise", "network/Add": "bias"}),
        (
            "eva02",
            {
                f"{BLOCK}.attn/Neg": "rotation",
                f"{BLOCK}.attn/Mul": "rotation",
                f"{BLOCK}.attn/Mul.1": "rotation",
                f"{BLOCK}.attn/Add.1": "rotation",
                f"{BLOCK}.mlp.act/Mul": "activation",  # SiLU
                f"{BLOCK}.mlp/Mul": "activation",  # the gate
            },
        ),
        (
            "cait",
            {
                f"{BLOCK}.attn.proj_l/MatMul": "mixing",
                f"{BLOCK}.attn.proj_l/Add": "bias",
                f"{BLOCK}.attn.proj_w/MatMul": "mixing",
                f"{BLOCK}/Mul": "scale",
                "network.blocks_token_only.0.attn.q/Gemm": "projection",
            },
        ),
        ("resnet", {"network.act1/Relu": "activation", "network.layer1.0/Add": "residual"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_roles_of_nodes(name: str, expected: dict[str, Role]) -> None:
    roles = guessed_roles(exported(name).graph)
    assert {node: roles[node] for node in expected} == expected


def graph_of(*nodes: onnx.NodeProto, **constants: np.ndarray) -> onnx.GraphProto:
    """A graph from x (B, 2, 4, 4) to y; the LayerNormalization in front makes x something other than the image."""
    value = helper.make_tensor_value_info
    first = helper.make_node("LayerNormalization", ["image", "weight"], ["x"], name="first")
    constants["weight"] = np.ones(4, np.float32)
    return helper.make_graph(
        [first, *nodes, helper.make_node("Gemm", ["z", "w"], ["y"], name="head")],
        "g",
        [value("image", TensorProto.FLOAT, ["b", 2, 4, 4])],
        [value("y", TensorProto.FLOAT, ["b", 2])],
        [numpy_helper.from_array(values, name) for name, values in constants.items()],
    )


PADS = np.array([0, 0, 1, 1, 0, 0, 1, 1])
ZERO, ONE = np.float32(0), np.float32(1)


@pytest.mark.parametrize(
    ("value", "mode", "expected"),
    [
        (None, None, "shape"),
        (ZERO, "constant", "shape"),
        (ONE, "constant", "unknown"),
        (None, "reflect", "unknown"),
        (ZERO, "edge", "unknown"),
    ],
)
def test_only_padding_by_zeros_is_known(value: np.float32 | None, mode: str | None, expected: Role) -> None:
    inputs = ["x", "pads", *([] if value is None else ["value"])]
    attributes = {} if mode is None else {"mode": mode}
    node = helper.make_node("Pad", inputs, ["z"], name="pad", **attributes)
    constants = {"pads": PADS} | ({} if value is None else {"value": np.asarray(value)})
    assert guessed_roles(graph_of(node, **constants))["pad"] == expected


@pytest.mark.parametrize(
    "operator", ["Erf", "Exp", "HardSwish", "MaxPool", "Neg", "ReduceL2", "ReduceSum", "Sqrt", "Softplus", "Tanh"]
)
def test_other_operators_are_unknown(operator: str) -> None:
    attributes = {"kernel_shape": [2, 2]} if operator == "MaxPool" else {}
    node = helper.make_node(operator, ["x"], ["z"], name="other", **attributes)
    assert guessed_roles(graph_of(node))["other"] == "unknown"


@pytest.mark.parametrize(("pieces", "expected"), [(("b", "a"), "rotation"), (("b", "other"), "mixing")])
def test_halves_of_the_same_tensor_are_rotated(pieces: tuple[str, str], expected: Role) -> None:
    """The sum x ∘ cos + swapped(x) ∘ sin is a rotation; with a half of another tensor, the sum is no rotation."""
    nodes = (
        helper.make_node("Relu", ["x"], ["r"], name="relu"),
        helper.make_node("Split", ["x"], ["a", "b"], name="split", axis=-1, num_outputs=2),
        helper.make_node("Split", ["r"], ["c", "other"], name="other", axis=-1, num_outputs=2),
        helper.make_node("Concat", pieces, ["swapped"], name="concat", axis=-1),
        helper.make_node("Mul", ["x", "cos"], ["first"], name="by cos"),
        helper.make_node("Mul", ["swapped", "sin"], ["second"], name="by sin"),
        helper.make_node("Add", ["first", "second"], ["z"], name="sum"),
    )
    table = np.ones((4, 4), np.float32)
    roles = guessed_roles(graph_of(*nodes, cos=table, sin=table))
    assert (roles["by cos"], roles["by sin"]) == (expected, expected)
    assert (roles["sum"] == "rotation") == (expected == "rotation")


@pytest.mark.parametrize("operator", ["Add", "Sub"])
def test_the_largest_logits_of_a_head_on_every_token(operator: str) -> None:
    """In pooled logits + max over tokens of (x W + b), the linear map inside the maximum is a head."""
    nodes = (
        helper.make_node("MatMul", ["x", "w"], ["m"], name="tokens"),
        helper.make_node(operator, ["m", "b"], ["logits"], name="bias"),
        helper.make_node("ReduceMax", ["logits"], ["largest"], name="max", keepdims=0),
        helper.make_node("ReduceMean", ["x"], ["z"], name="mean", keepdims=0),
        helper.make_node("Gemm", ["z", "w"], ["pooled"], name="pooled"),
        helper.make_node("Add", ["pooled", "largest"], ["y"], name="sum"),
    )
    graph = graph_of(*nodes, b=np.ones(4, np.float32), w=np.ones((4, 4), np.float32))
    del graph.node[-1]  # the last Gemm of `graph_of`
    roles = guessed_roles(graph)
    assert roles["sum"] == "head"
    assert roles["tokens"] == ("head" if operator == "Add" else "embedding")  # the first linear map of the input
