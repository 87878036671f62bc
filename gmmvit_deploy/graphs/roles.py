"""Roles of a graph's nodes, by which the precision policy assigns types.

input        scaling and normalisation of pixels
embedding    the first linear map or convolution, on the image itself
projection   any later linear map: QKV, output projection, mlp, merging
depthwise    a convolution that mixes no channels: PiT's pooling, T2T's unfold
product      Q Kᵀ and P V: no constant on either side
scale        the scalar d^(−1/2), where no mask contains it
mask         M ∘ S
score_bias   + B on the scores
softmax      its sums and exponentials
mixing       CaiT's products over heads, or the multiplications and sums that replace them
norm         LayerNorm: mean, variance, scale and shift
gelu         GELU
bias         + a constant beside a linear map, or the position embedding
residual     the sum of a branch and the input of the branch
pooling      the mean over tokens
head         a linear map after the mean over tokens, with a row per image, and the node that outputs the logits
quantize     QuantizeLinear and DequantizeLinear around a projection
shape        moves values, computes nothing
unknown      a node of a graph from another exporter that no rule matches: float32 in every precision

Our exporter writes the role into each node (`declared`). Graphs from other exporters declare no roles; `guessed_roles`
infers them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gmmvit_deploy.graphs.declared import SHAPE_OPERATORS, Attention, declared_attention, declared_role
from gmmvit_deploy.graphs.guessed_roles import guessed_attentions, guessed_roles
from gmmvit_deploy.precision import Role

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

__all__ = [
    "SHAPE_OPERATORS",
    "Attention",
    "Role",
    "attentions_of",
    "declared_attentions",
    "role_disagreements",
    "roles_of",
    "unknown_operators",
]


def roles_of(graph: GraphProto) -> dict[str, Role]:
    """Map each node's name to its declared role, or to the role that `guessed_roles` infers if it declares no role.

    Errors: ExportError when a declared role is not a role of the policy.
    """
    declared = {node.name: declared_role(node) for node in graph.node}
    roles = {name: role for name, role in declared.items() if role is not None}
    if len(roles) == len(declared):
        return roles
    return {**guessed_roles(graph), **roles}


def attentions_of(graph: GraphProto) -> tuple[Attention, ...]:
    """Return every attention in the graph's order, as declared, or inferred if no node declares a role."""
    if not any(declared_role(node) for node in graph.node):
        return guessed_attentions(graph)
    return declared_attentions(graph)


def declared_attentions(graph: GraphProto) -> tuple[Attention, ...]:
    """Return every attention that the graph's nodes declare, in the graph's order.

    An attention without a product before and a product after its softmax has ``known=False``.
    """
    parts: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        name = declared_attention(node)
        if name is not None:
            parts.setdefault(name, []).append(node)
    matrices = {constant.name for constant in graph.initializer if math.prod(constant.dims) > 1}
    return tuple(_declared(name, nodes, matrices) for name, nodes in parts.items())


def _declared(name: str, nodes: list[NodeProto], matrices: set[str]) -> Attention:
    roles = [declared_role(node) for node in nodes]
    softmaxes = [index for index, role in enumerate(roles) if role == "softmax"]
    if not softmaxes or "product" not in roles[: softmaxes[0]] or "product" not in roles[softmaxes[-1] :]:
        alone = [nodes[index] for index in softmaxes] or nodes
        return Attention(name=name, nodes=tuple(node.name for node in alone), known=False)
    masks = [
        other
        for node, role in zip(nodes, roles, strict=True)
        if role == "mask"
        for other in node.input
        if other in matrices
    ]
    return Attention(
        name=name,
        nodes=tuple(node.name for node in nodes),
        mask=masks[0] if masks else None,
        mixes_heads="mixing" in roles,
    )


def role_disagreements(graph: GraphProto) -> tuple[str, ...]:
    """Describe each node whose declared role differs from the inferred role; the declared role is used.

    Inferred roles are only a cross-check: if the rules fail on a graph, a single line states the failure.
    Errors: ExportError when a declared role is not a role of the policy.
    """
    declared = {node.name: role for node in graph.node if (role := declared_role(node)) is not None}
    try:
        guessed = guessed_roles(graph)
        return tuple(
            f"{name}: declared {role}, its operators and wiring suggest {guessed[name]}"
            for name, role in declared.items()
            if guessed[name] not in (role, "unknown")
        )
    except Exception as exc:  # a failed cross-check must not end the export of a graph that declares its roles
        return (f"every node: the rules for operators and wiring fail on this graph ({type(exc).__name__}: {exc})",)


def unknown_operators(graph: GraphProto) -> tuple[str, ...]:
    """List ``name: operator`` of every node whose role is unknown."""
    roles = roles_of(graph)
    return tuple(f"{node.name}: {node.op_type}" for node in graph.node if roles[node.name] == "unknown")
