"""Prove that an exported graph is folded: each mask and bias is a constant, and nothing computes it at run time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.graphs.constants import ConstantRecord, LayerConstant, LayerConstants, bytes_of_array
from gmmvit_deploy.writing import sha256_of_bytes

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto

__all__ = ["constant_nodes", "prove_folded"]

FORBIDDEN = frozenset({"Einsum", "Exp", "Pow", "Reciprocal", "ScatterND", "Sqrt"})
"""Operators that a folded graph does not contain: each is a remaining part of a mask's computation."""


def constant_nodes(graph: GraphProto) -> list[str]:
    """Return the nodes whose inputs are all constants: they should have been folded."""
    constants = {initializer.name for initializer in graph.initializer}
    idle = []
    for node in graph.node:
        if node.op_type == "Constant":
            constants.update(node.output)
        elif all(name in constants or not name for name in node.input):
            idle.append(f"{node.name or node.output[0]} ({node.op_type})")
            constants.update(node.output)
    return idle


def prove_folded(
    proto: ModelProto, folded: LayerConstants
) -> tuple[tuple[ConstantRecord, ...], tuple[ConstantRecord, ...]]:
    """Check the whole graph, and find the constant of every mask and every bias.

    Layers with equal masks may share a constant.  Returns (masks, biases).
    Errors: ExportError when the graph has an operator of `FORBIDDEN`, when all inputs of a node are constants, or when
    a mask or bias is absent, stored more often than layers use it, or not read exactly once by each of its layers.
    """
    graph = proto.graph
    operators = Counter(node.op_type for node in graph.node)
    if left := sorted(FORBIDDEN & operators.keys()):
        raise ExportError(f"the graph is not folded: it still has {', '.join(left)}")
    if idle := constant_nodes(graph):
        raise ExportError(f"the graph computes constants at run time: {', '.join(idle)}")
    return (
        _find_constants(graph, folded.masks, what="mask", operator="Mul"),
        _find_constants(graph, folded.biases, what="bias", operator="Add"),
    )


def _find_constants(
    graph: GraphProto, constants: Sequence[LayerConstant], *, what: str, operator: str
) -> tuple[ConstantRecord, ...]:
    names_by_bytes = _float_constants(graph, {tuple(folded_constant.constant.shape) for folded_constant in constants})
    layers_by_bytes = Counter(bytes_of_array(folded_constant.constant) for folded_constant in constants)
    records = []
    for folded_constant in constants:
        data = bytes_of_array(folded_constant.constant)
        names = names_by_bytes.get(data, [])
        layers = layers_by_bytes[data]
        # The exporter merges equal constants only if they are small: equal layers share a constant or have a copy each.
        if not 1 <= len(names) <= layers:
            once = "once" if layers == 1 else f"1 to {layers} times"
            raise ExportError(
                f"{folded_constant.layer}: its {what} is in the graph {len(names)} times; expected {once}"
            )
        readers = {name: [node for node in graph.node if name in node.input] for name in names}
        uses = [node.op_type for nodes in readers.values() for node in nodes]
        if uses != [operator] * layers or not all(readers.values()):
            raise ExportError(
                f"{folded_constant.layer}: its {what} is used by {uses or 'no node'}; "
                f"expected one {operator} in each layer"
            )
        own = f"{folded_constant.layer}.scores"
        name = next((name for name in names if any(node.name.startswith(own) for node in readers[name])), names[0])
        records.append(
            ConstantRecord(
                layer=folded_constant.layer,
                shape=tuple(folded_constant.constant.shape),
                trained_sha256=sha256_of_bytes(bytes_of_array(folded_constant.trained)),
                constant_sha256=sha256_of_bytes(data),
                constant=name,
            )
        )
    return tuple(records)


def _float_constants(graph: GraphProto, shapes: set[tuple[int, ...]]) -> dict[bytes, list[str]]:
    """Map the bytes of every float32 constant of the given shapes to the names of the constants with these bytes."""
    from onnx import TensorProto, numpy_helper

    tensors = [(initializer.name, initializer) for initializer in graph.initializer]
    tensors += [
        (node.output[0], attribute.t)
        for node in graph.node
        if node.op_type == "Constant"
        for attribute in node.attribute
        if attribute.name == "value"
    ]
    names_by_bytes: dict[bytes, list[str]] = {}
    for name, tensor in tensors:
        if tensor.data_type == TensorProto.FLOAT and tuple(tensor.dims) in shapes:
            values = numpy_helper.to_array(tensor)
            names_by_bytes.setdefault(np.ascontiguousarray(values).astype("<f4", copy=False).tobytes(), []).append(name)
    return names_by_bytes
