"""Infer the role of each node in a graph from another exporter, from the operators and connections of the nodes.

A role says what a node is for (`roles`). The nodes of a graph that this package exported declare their roles
(`declared`), and declared roles take precedence over inferred roles. A node that no rule matches has the role
``unknown``, and computes in float32 in every precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from gmmvit_deploy.graphs.declared import SHAPE_OPERATORS, Attention
from gmmvit_deploy.graphs.role_patterns import (
    adds_token_sum,
    head_nodes,
    is_activation,
    pads_by_zero,
    root_mean_square_nodes,
    rotation_nodes,
    size_values,
    sum_norm_nodes,
    talking_heads,
)
from gmmvit_deploy.graphs.wiring import Wiring, attribute_of
from gmmvit_deploy.inference.precision import Role

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, TensorProto

_DIRECT: dict[str, Role] = {
    "Softmax": "softmax",
    "LayerNormalization": "norm",
    "BatchNormalization": "norm",
    "Gelu": "gelu",
    "ReduceMean": "pooling",
    "Constant": "shape",
    "QuantizeLinear": "quantize",
    "DequantizeLinear": "quantize",
    **dict.fromkeys(SHAPE_OPERATORS, "shape"),
}
_BETWEEN = frozenset({"Add", "Cast", "Mul", "Reshape"})


def guessed_attentions(graph: GraphProto) -> tuple[Attention, ...]:
    """Return an `Attention` for every softmax; ``known`` is True if the softmax is between two matrix products."""
    wiring = Wiring(graph)
    talking = talking_heads(graph, wiring)
    return tuple(_attention(node, wiring, talking) for node in graph.node if node.op_type == "Softmax")


def _attention(softmax: NodeProto, wiring: Wiring, talking: Mapping[str, Role]) -> Attention:
    name = softmax.name.rpartition("/")[0] or softmax.name
    before = _walk(
        wiring.maker.get(softmax.input[0]),
        wiring,
        talking,
        lambda node: wiring.maker.get(next(iter(wiring.computed_inputs(node)), "")),
    )
    after = _walk(
        wiring.only_reader(softmax.output[0]), wiring, talking, lambda node: wiring.only_reader(node.output[0])
    )
    if not before or not after:
        return Attention(name=name, nodes=(softmax.name,), known=False)
    inside = [*reversed(before), softmax, *after]
    masks = [
        node.input[index]
        for node in before
        if node.op_type == "Mul"
        and (index := wiring.constant_input(node)) is not None
        and wiring.sizes[node.input[index]] > 1
    ]
    return Attention(
        name=name,
        nodes=tuple(node.name for node in inside),
        mask=masks[0] if masks else None,
        mixes_heads=any(wiring.is_mixing(node) or node.name in talking for node in inside),
    )


def _walk(
    node: NodeProto | None,
    wiring: Wiring,
    talking: Mapping[str, Role],
    onwards: Callable[[NodeProto], NodeProto | None],
) -> list[NodeProto]:
    """Return the nodes on the path from ``node`` to the next matrix product, with both; empty without such a product.

    onwards: returns the next node on the path, or None at its end.
    """
    passed: list[NodeProto] = []
    while node is not None:
        passed.append(node)
        if wiring.is_product(node):
            return passed
        if node.op_type not in _BETWEEN and not wiring.is_mixing(node) and node.name not in talking:
            return []
        node = onwards(node)
    return []


def guessed_roles(graph: GraphProto) -> dict[str, Role]:
    """Map the name of each node to the node's role, or to ``unknown`` if no rule applies."""
    wiring = Wiring(graph)
    inside = {name for attention in guessed_attentions(graph) for name in attention.nodes}
    recognised: dict[str, Role] = {
        **dict.fromkeys(head_nodes(graph, wiring), "head"),
        **dict.fromkeys(rotation_nodes(graph, wiring), "rotation"),
        **dict.fromkeys(sum_norm_nodes(graph, wiring), "norm"),
        **talking_heads(graph, wiring),
    }
    norms = root_mean_square_nodes(graph, wiring)
    sizes = size_values(graph, wiring)
    image = {value.name for value in graph.input}  # the image, and the image scaled, normalised, normed or rearranged
    activated: set[str] = set()
    roles: dict[str, Role] = {}
    for node in graph.node:
        read = wiring.computed_inputs(node)
        on_image = bool(read) and image.issuperset(read)
        if node.name in norms:
            role: Role = "norm"
        elif node.op_type in _DIRECT:
            role = _DIRECT[node.op_type]
        elif sizes.issuperset(node.output) or pads_by_zero(node, wiring):
            role = "shape"
        elif node.name in recognised:
            role = recognised[node.name]
        elif is_activation(node, wiring, activated):
            role = "activation"
        elif node.op_type in ("MatMul", "Gemm", "Conv"):
            role = _linear_role(node, wiring, on_image=on_image)
        else:
            role = _elementwise_role(node, wiring, inside=node.name in inside, on_image=on_image)
        roles[node.name] = role
        if role in ("activation", "gelu"):
            activated.update(node.output)
        if on_image and role in ("shape", "input", "norm") and node.op_type != "Shape":
            image.update(node.output)
    return roles


def _linear_role(node: NodeProto, wiring: Wiring, *, on_image: bool) -> Role:
    if wiring.is_product(node):
        return "product"
    if wiring.is_mixing(node):
        return "mixing"
    if attribute_of(node, "group", 1) > 1:
        return "depthwise"
    if any(made.op_type == "ReduceMean" for name in node.input if (made := wiring.maker.get(name))):
        return "head"
    return "embedding" if on_image else "projection"


def _elementwise_role(node: NodeProto, wiring: Wiring, *, inside: bool, on_image: bool) -> Role:
    operator, index = node.op_type, wiring.constant_input(node)
    if on_image and operator in ("Cast", "Div", "Sub"):
        return "input"
    if operator == "Cast":
        return "shape"
    if operator == "ReduceSum":
        made = wiring.made_by(node.input[0], "MatMul")
        return "mixing" if made is not None and wiring.is_product(made) else "unknown"
    if operator == "Mul" and index is not None:
        return _factor_role(wiring.initializers.get(node.input[index]), wiring.sizes[node.input[index]], inside=inside)
    if operator == "Add":
        if inside:
            return "score_bias"
        return "residual" if index is None and not adds_token_sum(node, wiring) else "bias"
    return "unknown"


def _factor_role(constant: TensorProto | None, size: int, *, inside: bool) -> Role:
    """Return the role of an elementwise multiplication by a constant; None if the graph computes it from others."""
    dims = list(constant.dims) if constant is not None else []
    if size == 1:
        return "scale"
    if inside:
        return "scale" if dims[-2:] == [1, 1] else "mask"
    # LayerScale multiplies each feature by a number; the factors of rewritten head mixing differ between heads as well.
    return "scale" if dims and sum(dim > 1 for dim in dims) == 1 else "mixing"
