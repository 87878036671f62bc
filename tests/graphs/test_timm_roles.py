"""Roles of the nodes of timm's architectures, inferred from the graph: which nodes have a role, and which role."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from gmmvit_deploy.graphs.guessed_roles import guessed_roles
from gmmvit_deploy.graphs.roles import attentions_of
from gmmvit_deploy.inference.precision import Role
from tests.graphs.small_graphs import graph
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


def roles_by_name(graph: ir.Graph) -> dict[str | None, Role]:
    return {node.name: role for node, role in guessed_roles(graph).items()}


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
    roles = roles_by_name(exported(name).graph)
    assert {node: roles[node] for node in expected} == expected


def roles_in(body: str, **constants: object) -> dict[str | None, Role]:
    """Return the roles in a graph with these nodes from x (B, 2, 4, 4), which is not the image, to z; y is the head."""
    ones = {"weight": np.ones(4, np.float32), "w": np.ones((4, 4), np.float32)}
    body = f"x1 = LayerNormalization(x, weight) {body} y = MatMul(z, w)"
    return roles_by_name(graph(body, x="batch, 2, 4, 4", **ones, **constants).graph)


@pytest.mark.parametrize(
    ("value", "mode", "expected"),
    [
        (None, "constant", "shape"),
        (0, "constant", "shape"),
        (1, "constant", "unknown"),
        (None, "reflect", "unknown"),
        (0, "edge", "unknown"),
    ],
)
def test_only_padding_by_zeros_is_known(value: int | None, mode: str, expected: Role) -> None:
    pads, value_name = np.array([0, 0, 1, 1, 0, 0, 1, 1]), "" if value is None else ", value"
    roles = roles_in(f'z = Pad<mode = "{mode}">(x1, pads{value_name})', pads=pads, value=np.float32(value or 0))
    assert roles["z"] == expected


@pytest.mark.parametrize(
    "operator", ["Erf", "Exp", "HardSwish", "Neg", "ReduceL2", "ReduceSum", "Sqrt", "Softplus", "Tanh"]
)
def test_other_operators_are_unknown(operator: str) -> None:
    assert roles_in(f"z = {operator}(x1)")["z"] == "unknown"


@pytest.mark.parametrize(("pieces", "expected"), [("b, a", "rotation"), ("b, other", "mixing")])
def test_halves_of_the_same_tensor_are_rotated(pieces: str, expected: Role) -> None:
    """The sum x ∘ cos + swapped(x) ∘ sin is a rotation; with a half of another tensor, the sum is no rotation."""
    body = f"""
        r = Relu(x1)
        a, b = Split<axis = -1, num_outputs = 2>(x1)
        c, other = Split<axis = -1, num_outputs = 2>(r)
        swapped = Concat<axis = -1>({pieces})
        by_cos = Mul(x1, table)
        by_sin = Mul(swapped, table)
        z = Add(by_cos, by_sin)
    """
    roles = roles_in(body, table=np.ones((4, 4), np.float32))
    assert (roles["by_cos"], roles["by_sin"]) == (expected, expected)
    assert (roles["z"] == "rotation") == (expected == "rotation")


@pytest.mark.parametrize("operator", ["Add", "Sub"])
def test_the_largest_logits_of_a_head_on_every_token(operator: str) -> None:
    """In pooled logits + max over tokens of (x W + b), the linear map inside the maximum is a head."""
    body = f"""
        tokens = MatMul(x, w)
        logits = {operator}(tokens, b)
        largest = ReduceMax<keepdims = 0>(logits, axes)
        mean = ReduceMean<keepdims = 0>(x, axes)
        pooled = MatMul(mean, w)
        y = Add(pooled, largest)
    """
    constants = {"b": np.ones(4, np.float32), "w": np.ones((4, 4), np.float32), "axes": np.array([1])}
    roles = roles_by_name(graph(body, x="batch, 2, 4", y="batch, 4", **constants).graph)
    assert roles["y"] == "head"
    assert roles["tokens"] == ("head" if operator == "Add" else "embedding")  # the first linear map of the input
