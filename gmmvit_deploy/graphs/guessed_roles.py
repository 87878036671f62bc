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
from gmmvit_deploy.graphs.wiring import Constants, made_by, only_reader, producer_of, values_of
from gmmvit_deploy.inference.precision import Role

if TYPE_CHECKING:
    import onnx_ir as ir

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


def guessed_attentions(graph: ir.Graph) -> list[tuple[str, list[ir.Node]]]:
    """Return (name, nodes) for every softmax: the nodes from Q Kᵀ to P V, or only the softmax if it is not between two
    matrix products.
    """
    constants = Constants(graph)
    passable = {node for node in graph if node.op_type in _BETWEEN or constants.is_mixing(node)}
    passable |= talking_heads(graph, constants).keys()

    def before(node: ir.Node) -> ir.Node | None:
        return producer_of(next(iter(constants.computed(node)), None))

    def after(node: ir.Node) -> ir.Node | None:
        return only_reader(node.outputs[0])

    attentions = []
    for softmax in graph:
        if softmax.op_type == "Softmax":
            query_key, weights_value = (_walk(softmax, onwards, constants, passable) for onwards in (before, after))
            inside = [*reversed(query_key), softmax, *weights_value] if query_key and weights_value else [softmax]
            name = str(softmax.name)
            attentions.append((name.rpartition("/")[0] or name, inside))
    return attentions


def _walk(
    softmax: ir.Node, onwards: Callable[[ir.Node], ir.Node | None], constants: Constants, passable: set[ir.Node]
) -> list[ir.Node]:
    """Return the nodes after the softmax up to a matrix product, in the direction of ``onwards``; empty without one."""
    passed: list[ir.Node] = []
    node = onwards(softmax)
    while node is not None:
        passed.append(node)
        if constants.is_product(node):
            return passed
        node = onwards(node) if node in passable else None
    return []


def guessed_roles(graph: ir.Graph) -> dict[ir.Node, Role]:
    """Map each node to its role, or to ``unknown`` if no rule applies."""
    constants = Constants(graph)
    inside = {node for _, nodes in guessed_attentions(graph) for node in nodes}
    recognised: dict[ir.Node, Role] = {
        **dict.fromkeys(head_nodes(graph, constants), "head"),
        **dict.fromkeys(rotation_nodes(graph, constants), "rotation"),
        **dict.fromkeys(sum_norm_nodes(graph, constants), "norm"),
        **talking_heads(graph, constants),
    }
    norms = root_mean_square_nodes(graph, constants)
    sizes = size_values(graph)
    image = set(graph.inputs)  # the image, and the image scaled, normalised, normed or rearranged
    activated: set[ir.Value | None] = set()
    roles: dict[ir.Node, Role] = {}
    for node in graph:
        read = constants.computed(node)
        on_image = bool(read) and image.issuperset(read)
        if node in norms:
            role: Role = "norm"
        elif node.op_type in _DIRECT:
            role = _DIRECT[node.op_type]
        elif sizes.issuperset(node.outputs) or pads_by_zero(node):
            role = "shape"
        elif node in recognised:
            role = recognised[node]
        elif is_activation(node, constants, activated):
            role = "activation"
        elif node.op_type in ("MatMul", "Gemm", "Conv"):
            role = _linear_role(node, constants, on_image=on_image)
        else:
            role = _elementwise_role(node, constants, inside=node in inside, on_image=on_image)
        roles[node] = role
        if role in ("activation", "gelu"):
            activated.update(node.outputs)
        if on_image and role in ("shape", "input", "norm") and node.op_type != "Shape":
            image.update(node.outputs)
    return roles


def _linear_role(node: ir.Node, constants: Constants, *, on_image: bool) -> Role:
    if constants.is_product(node):
        return "product"
    if constants.is_mixing(node):
        return "mixing"
    if node.attributes.get_int("group", 1) > 1:
        return "depthwise"
    if any(made_by(value, "ReduceMean") for value in node.inputs):
        return "head"
    return "embedding" if on_image else "projection"


def _elementwise_role(node: ir.Node, constants: Constants, *, inside: bool, on_image: bool) -> Role:
    operator, index = node.op_type, constants.index(node)
    if on_image and operator in ("Cast", "Div", "Sub"):
        return "input"
    if operator == "Cast":
        return "shape"
    if operator == "ReduceSum":
        made = made_by(node.inputs[0], "MatMul")
        return "mixing" if made is not None and constants.is_product(made) else "unknown"
    if operator == "Mul" and index is not None:
        return _factor_role(node.inputs[index], constants.sizes[node.inputs[index]], inside=inside)
    if operator == "Add":
        if inside:
            return "score_bias"
        return "residual" if index is None and not adds_token_sum(node, constants) else "bias"
    return "unknown"


def _factor_role(constant: ir.Value | None, size: int, *, inside: bool) -> Role:
    """Return the role of an elementwise multiplication by a constant, which may be computed from others."""
    values = values_of(constant)
    dims = [] if values is None else list(values.shape)
    if size == 1:
        return "scale"
    if inside:
        return "scale" if dims[-2:] == [1, 1] else "mask"
    # LayerScale multiplies each feature by a number; the factors of rewritten head mixing differ between heads as well.
    return "scale" if dims and sum(dim > 1 for dim in dims) == 1 else "mixing"
