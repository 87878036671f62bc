"""Infer the role and the attention of each node in a graph of another exporter, whose nodes declare none (`roles`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gmmvit_deploy.graphs.declared import SHAPE_OPERATORS
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


def guessed_attentions(graph: GraphProto) -> list[tuple[str, list[NodeProto]]]:
    """Return (name, nodes) for every softmax: the nodes from Q Kᵀ to P V, or only the softmax if it is not between two
    matrix products.
    """
    wiring = Wiring(graph)
    passable = {node.name for node in graph.node if node.op_type in _BETWEEN or wiring.is_mixing(node)}
    passable |= talking_heads(graph, wiring).keys()

    def before(node: NodeProto) -> NodeProto | None:
        return wiring.maker.get(next(iter(wiring.computed_inputs(node)), ""))

    def after(node: NodeProto) -> NodeProto | None:
        return wiring.only_reader(node.output[0])

    attentions = []
    for softmax in graph.node:
        if softmax.op_type == "Softmax":
            query_key, weights_value = (_walk(softmax, onwards, wiring, passable) for onwards in (before, after))
            inside = [*reversed(query_key), softmax, *weights_value] if query_key and weights_value else [softmax]
            attentions.append((softmax.name.rpartition("/")[0] or softmax.name, inside))
    return attentions


def _walk(
    softmax: NodeProto, onwards: Callable[[NodeProto], NodeProto | None], wiring: Wiring, passable: set[str]
) -> list[NodeProto]:
    """Return the nodes after the softmax up to a matrix product, in the direction of ``onwards``; empty without one."""
    passed: list[NodeProto] = []
    node = onwards(softmax)
    while node is not None:
        passed.append(node)
        if wiring.is_product(node):
            return passed
        node = onwards(node) if node.name in passable else None
    return []


def guessed_roles(graph: GraphProto) -> dict[str, Role]:
    """Map the name of each node to the node's role, or to ``unknown`` if no rule applies."""
    wiring = Wiring(graph)
    inside = {node.name for _, nodes in guessed_attentions(graph) for node in nodes}
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
