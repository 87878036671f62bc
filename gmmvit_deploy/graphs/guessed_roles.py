"""Infer the role of each node in a graph from another exporter, from the operators and connections of the nodes.

A role says what a node is for (`roles`). The nodes of a graph that this package exported declare their roles
(`declared`), and declared roles take precedence over inferred roles. A node that no rule matches has the role
``unknown``, and computes in float32 in every precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gmmvit_deploy.graphs.declared import SHAPE_OPERATORS, Attention
from gmmvit_deploy.graphs.wiring import Wiring
from gmmvit_deploy.precision import Role

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

__all__ = ["guessed_attentions", "guessed_roles"]

_DIRECT: dict[str, Role] = {
    "Softmax": "softmax",
    "LayerNormalization": "norm",
    "Gelu": "gelu",
    "ReduceMean": "pooling",
    "ReduceSum": "mixing",
    "Constant": "shape",
    "QuantizeLinear": "quantize",
    "DequantizeLinear": "quantize",
    **dict.fromkeys(SHAPE_OPERATORS, "shape"),
}
_BETWEEN = frozenset({"Add", "Cast", "Mul", "Reshape"})


def guessed_attentions(graph: GraphProto) -> tuple[Attention, ...]:
    """Return an `Attention` for every softmax; ``known`` is True if the softmax is between two matrix products."""
    wiring = Wiring(graph)
    return tuple(_attention(node, wiring) for node in graph.node if node.op_type == "Softmax")


def _attention(softmax: NodeProto, wiring: Wiring) -> Attention:
    name = softmax.name.rpartition("/")[0] or softmax.name
    before = _walk(
        wiring.maker.get(softmax.input[0]),
        wiring,
        lambda node: wiring.maker.get(next(iter(wiring.computed_inputs(node)), "")),
    )
    after = _walk(wiring.only_reader(softmax.output[0]), wiring, lambda node: wiring.only_reader(node.output[0]))
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
        mixes_heads=any(wiring.is_mixing(node) for node in inside),
    )


def _walk(node: NodeProto | None, wiring: Wiring, onwards: Callable[[NodeProto], NodeProto | None]) -> list[NodeProto]:
    """Return the nodes on the path from ``node`` to the next matrix product, including ``node`` and the matrix product.

    The result is empty if the path does not reach a matrix product.
    onwards: a function that returns the next node on the path, or None at the end of the path.
    """
    passed: list[NodeProto] = []
    while node is not None:
        passed.append(node)
        if wiring.is_product(node):
            return passed
        if node.op_type not in _BETWEEN and not wiring.is_mixing(node):
            return []
        node = onwards(node)
    return []


def guessed_roles(graph: GraphProto) -> dict[str, Role]:
    """Map the name of each node to the node's role, or to ``unknown`` if no rule applies."""
    wiring = Wiring(graph)
    logits = {value.name for value in graph.output}
    inside = {name for attention in guessed_attentions(graph) for name in attention.nodes}
    image = {value.name for value in graph.input}  # the image, and the image scaled, normalised or rearranged
    roles: dict[str, Role] = {}
    for node in graph.node:
        on_image = all(name in image for name in wiring.computed_inputs(node))
        if node.op_type in _DIRECT:
            role = _DIRECT[node.op_type]
        elif logits & set(node.output):
            role = "head"
        elif node.op_type in ("MatMul", "Gemm", "Conv"):
            role = _linear_role(node, wiring, on_image=on_image)
        else:
            role = _elementwise_role(node, wiring, inside=node.name in inside, on_image=on_image)
        roles[node.name] = role
        if on_image and role in ("shape", "input"):
            image.update(node.output)
    return roles


def _linear_role(node: NodeProto, wiring: Wiring, *, on_image: bool) -> Role:
    if wiring.is_product(node):
        return "product"
    if wiring.is_mixing(node):
        return "mixing"
    if next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1) > 1:
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
    if operator == "Mul" and index is not None:
        tensor = wiring.initializers.get(node.input[index])
        per_head = tensor is not None and inside and list(tensor.dims[-2:]) == [1, 1]
        if per_head or wiring.sizes[node.input[index]] == 1:
            return "scale"
        return "mask" if inside else "mixing"
    if operator == "Add":
        if index is None:
            return "residual"
        return "score_bias" if inside else "bias"
    return "unknown"
