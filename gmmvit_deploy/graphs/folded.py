"""Check that an exported graph is folded: the graph stores each mask and bias as a constant.

The checks also refuse a graph that computes a constant at run time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.files.writing import sha256_of_bytes
from gmmvit_deploy.graphs.constants import ConstantRecord, LayerConstant, bytes_of_array
from gmmvit_deploy.graphs.declared import declared_role
from gmmvit_deploy.graphs.wiring import Constants, input_of, made_by, stored, values_of

if TYPE_CHECKING:
    import onnx_ir as ir

_EXPORT = "type gmmvit export CHECKPOINT -o BUNDLE to write a graph with folded masks"
FORBIDDEN = frozenset({"Einsum", "Exp", "Pow", "Reciprocal", "ScatterND", "Sqrt"})
"""Operators with which an unfolded graph computes its masks.  A folded graph contains no such operator."""


def constant_nodes(graph: ir.Graph) -> list[str]:
    """Return ``name (operator)`` for each node whose inputs are all constants.

    A folded graph has no such node, except the nodes that dequantise weights.
    """
    constants = {*Constants(graph).sizes, None}
    return [
        f"{node.name or node.outputs[0].name} ({node.op_type})"
        for node in graph
        if node.op_type != "Constant" and constants.issuperset(node.inputs)
    ]


def unfolded_operators(graph: ir.Graph) -> list[str]:
    """Return the operators of `FORBIDDEN` that the graph contains, sorted.

    Norms and activations do not count: a norm divides by a square root that depends on the image.
    """
    elsewhere = ("norm", "activation", "gelu")
    return sorted(FORBIDDEN & {node.op_type for node in graph if declared_role(node) not in elsewhere})


def require_folded(graph: ir.Graph) -> None:
    """Check that a graph computes no mask and no other constant at run time.  Errors: ExportError when it does."""
    if left := unfolded_operators(graph):
        raise ExportError(
            f"the graph computes its mask at run time, with the operators {', '.join(left)}", hint=_EXPORT
        )
    idle = [name for name in constant_nodes(graph) if not name.endswith("(DequantizeLinear)")]
    if idle:
        what = (
            "computes its mask at run time"
            if any("mask" in name for name in idle)
            else "computes constants at run time"
        )
        more = f" and {len(idle) - 3} more" if len(idle) > 3 else ""
        raise ExportError(f"the graph {what}, in {', '.join(idle[:3])}{more}", hint=_EXPORT)


def prove_folded(
    graph: ir.Graph,
    masks: Sequence[LayerConstant],
    biases: Sequence[LayerConstant],
    *,
    foreign: bool = False,
) -> tuple[tuple[ConstantRecord, ...], tuple[ConstantRecord, ...]]:
    """Check that a graph is folded.  Layers with equal masks, or with equal biases, may share a constant.

    foreign: True if another package defines the network, which may use the operators of `FORBIDDEN` for other purposes.
    Returns (the record of each mask, the record of each bias).
    Errors: ExportError when

    - the graph contains an operator of `FORBIDDEN` outside norms and activations, or computes a constant;
    - a mask or bias is absent, or has more copies than layers;
    - other nodes read it than one Mul (a mask) or one Add (a bias) in each of its layers.
    """
    if not foreign and (left := unfolded_operators(graph)):
        raise ExportError(f"the graph is not folded: it contains the operators {', '.join(left)}")
    if idle := constant_nodes(graph):
        raise ExportError(f"the graph computes constants at run time: {', '.join(idle)}")
    return (
        _find_constants(graph, masks, what="mask", operator="Mul"),
        _find_constants(graph, biases, what="bias", operator="Add"),
    )


def _find_constants(
    graph: ir.Graph, constants: Sequence[LayerConstant], *, what: str, operator: str
) -> tuple[ConstantRecord, ...]:
    values_by_bytes = _float_constants(graph, {tuple(folded.constant.shape) for folded in constants})
    layers_by_bytes = Counter(bytes_of_array(folded.constant) for folded in constants)
    records = []
    for folded in constants:
        data = bytes_of_array(folded.constant)
        values = values_by_bytes.get(data, [])
        layers = layers_by_bytes[data]
        # The exporter merges equal constants only if the constants are small. Layers with equal constants therefore
        # share a constant, or each layer has a copy.
        if not 1 <= len(values) <= layers:
            once = "once" if layers == 1 else f"1 to {layers} times"
            raise ExportError(
                f"{folded.layer}: expected the {what} of this layer {once} in the graph, got {len(values)} times"
            )
        readers = [[node for node, _ in value.uses()] for value in values]
        uses = [node.op_type for nodes in readers for node in nodes]
        if uses != [operator] * layers or not all(readers):
            raise ExportError(
                f"{folded.layer}: expected one {operator} node in each layer with this {what} to read the "
                f"{what}, and no other node; got {', '.join(uses) or 'no node'}"
            )
        own = f"{folded.layer}.scores"
        mine = [value for value, nodes in zip(values, readers, strict=True) if str(nodes[0].name).startswith(own)]
        records.append(
            ConstantRecord(
                layer=folded.layer,
                shape=tuple(folded.constant.shape),
                constant_sha256=sha256_of_bytes(data),
                constant=str((mine or values)[0].name),
            )
        )
    return tuple(records)


def prove_classes(graph: ir.Graph, weight: NDArray[Any], labels: Sequence[str]) -> None:
    """Check that the classifier in a graph is ``weight`` (C, D), bit for bit.  Errors: ExportError when it is not.

    labels: the names of the classes, for the message.
    """
    head = _classifier(graph)
    embeddings = _oriented(head, stored(head.inputs[1]))
    if embeddings.shape != weight.shape:
        raise ExportError(f"{head.name}: expected text embeddings {weight.shape}, got {embeddings.shape}")
    wrong = [index for index in range(len(weight)) if embeddings[index].tobytes() != weight[index].tobytes()]
    others = {row.tobytes(): label for row, label in zip(weight, labels, strict=True)}
    reasons = [
        f"{labels[index]!r} has the text embedding of {other!r}"
        if (other := others.get(embeddings[index].tobytes()))
        else f"{labels[index]!r} differs by up to {np.abs(embeddings[index] - weight[index]).max():.2e}"
        for index in wrong
    ]
    if reasons:
        more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
        raise ExportError(
            f"{head.name}: expected the text embedding of each class, bit for bit; {'; '.join(reasons[:3])}{more}"
        )


def exchange_classes(graph: ir.Graph, weight: NDArray[Any]) -> None:
    """Store other text embeddings (C, D), of any number of classes, in the classifier of a graph.

    It is in float32 in every precision; its bias is the same for each class.  Errors: ExportError as `prove_classes`.
    """
    import onnx_ir as ir

    head = _classifier(graph)
    constants = [_oriented(head, weight), *(np.resize(stored(bias), len(weight)) for bias in head.inputs[2:])]
    for number, array in enumerate(constants, 1):
        value = input_of(head, number)
        value.const_value, value.shape = ir.tensor(array, name=value.name), ir.Shape(array.shape)
    for logits in head.outputs:
        logits.shape = ir.Shape([*(logits.shape or ())[:1], len(weight)])


def _classifier(graph: ir.Graph) -> ir.Node:
    """Return the node that multiplies by the text embeddings.  Errors: ExportError when there is none."""
    head = next((made_by(value, "Gemm") for value in graph.outputs if value.name == "logits"), None)
    if head is None or values_of(head.inputs[1]) is None:
        raise ExportError("expected a Gemm with the text embeddings to compute the logits, got another operator")
    return head


def _oriented(head: ir.Node, matrix: NDArray[Any]) -> NDArray[Any]:
    """Turn text embeddings (C, D) into the second input of a Gemm, or back."""
    return matrix if head.attributes.get_int("transB", 0) else np.ascontiguousarray(matrix.T)


def stored_constants(graph: ir.Graph) -> dict[str, NDArray[Any]]:
    """Map the name of each constant, an initializer or a Constant node, to its values."""
    return {str(value.name): tensor.numpy() for value, tensor in _stored_tensors(graph).items()}


def _stored_tensors(graph: ir.Graph) -> dict[ir.Value, ir.TensorProtocol]:
    from onnx_ir.convenience import get_const_tensor

    values = [*graph.initializers.values(), *(node.outputs[0] for node in graph if node.op_type == "Constant")]
    tensors = ((value, get_const_tensor(value)) for value in values)
    return {value: tensor for value, tensor in tensors if tensor is not None}


def _float_constants(graph: ir.Graph, shapes: set[tuple[int, ...]]) -> dict[bytes, list[ir.Value]]:
    """Map bytes to all float32 constants with these bytes, for constants with a shape in ``shapes``."""
    import onnx_ir as ir

    values_by_bytes: dict[bytes, list[ir.Value]] = {}
    for value, tensor in _stored_tensors(graph).items():
        if tensor.dtype == ir.DataType.FLOAT and tuple(tensor.shape) in shapes:
            values_by_bytes.setdefault(bytes_of_array(tensor.numpy()), []).append(value)
    return values_by_bytes
