"""Read OpenVINO's graphs.

A value is an output of a node. Every shape is without the batch dimension.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_KINDS = {
    "Add": "addition",
    "Multiply": "multiplication",
    "Reshape": "reshape",
    "Softmax": "softmax",
    "Transpose": "transpose",
}
_MOVE_VALUES = {"Concat", "Gather", "Reshape", "Slice", "Split", "StridedSlice", "Transpose", "VariadicSplit"}


Key = tuple[str, int]
"""What tells the values of a graph apart: name of the node, index of its output."""


def key_of(value: Any) -> Key:
    return value.get_node().get_name(), value.get_index()


def nodes_of(model: Any, kind: str) -> list[Any]:
    """kind: OpenVINO's type.  The order is topological."""
    return [node for node in model.get_ordered_ops() if node.get_type_name() == kind]


def kind_of(value: Any) -> str:
    """Return the kind of the operator that computes a value, as in `_KINDS`; for others, its name in OpenVINO.

    ``matrix product`` is a MatMul that transposes neither input.
    """
    node = value.get_node()
    name = str(node.get_type_name())
    if name == "MatMul":
        attributes = node.get_attributes()
        transposes = attributes.get("transpose_a") or attributes.get("transpose_b")
        return "MatMul that transposes an input" if transposes else "matrix product"
    return _KINDS.get(name, name)


def inputs_of(value: Any) -> list[Any]:
    return list(value.get_node().input_values())


def constant(value: Any) -> Any:
    """Return a constant, also behind Convert nodes, as a numpy array; None for a computed value."""
    node = value.get_node()
    while node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    return node.data if node.get_type_name() == "Constant" else None


def constant_and_other(value: Any, kind: str) -> tuple[Any, Any] | None:
    """Return (the constant input, the other input) of an operator of this kind; None without exactly one constant."""
    if kind_of(value) != kind:
        return None
    first, second = inputs_of(value)
    constants = constant(first), constant(second)
    if (constants[0] is None) == (constants[1] is None):
        return None
    return (constants[0], second) if constants[0] is not None else (constants[1], first)


def bounds_of(node: Any) -> tuple[float, float, float, float] | None:
    """Return the bounds of a FakeQuantize: lowest and highest input, lowest and highest output.

    None for another node, for bounds that are not single constants, and if the levels are not 256.
    """
    if node.get_type_name() != "FakeQuantize" or node.get_attributes()["levels"] != 256:
        return None
    bounds = [constant(node.input_value(index)) for index in range(1, 5)]
    if any(bound is None or bound.size != 1 for bound in bounds):
        return None
    low, high, out_low, out_high = (float(bound.reshape(())) for bound in bounds)
    return low, high, out_low, out_high


def reader_of(value: Any) -> Any:
    """Return the output of the only operator that reads this value, or None."""
    targets = list(value.get_target_inputs())
    return targets[0].get_node().output(0) if len(targets) == 1 else None


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a value, or None if a dimension is unknown."""
    shape = value.get_partial_shape()
    inner = [] if shape.rank.is_dynamic else list(shape)[1:]
    return tuple(size.get_length() for size in inner) if inner and all(size.is_static for size in inner) else None


def order_of(value: Any) -> list[int]:
    """Return the permutation of a transpose; empty if the permutation is not a constant."""
    order = constant(value.get_node().input_value(1))
    return [] if order is None else [int(axis) for axis in order.reshape(-1)]


def takers(node: Any) -> list[Any]:
    """Return the nodes that read the output of ``node``."""
    return [target.get_node() for target in node.output(0).get_target_inputs()]


def takers_behind_layout(node: Any) -> list[Any]:
    """Return the nodes that read the output of ``node``, also behind nodes that only move values, such as a Transpose.

    If a Concat joins the values with those of another node, only those of `takers`.
    """
    inside: list[Any] = [node]
    readers: list[Any] = []
    for each in inside:  # grows
        for target in (target for output in each.outputs() for target in output.get_target_inputs()):
            reader = target.get_node()
            if reader.get_type_name() not in _MOVE_VALUES:
                readers.append(reader)
            elif reader.get_name() not in {each.get_name() for each in inside}:
                inside.append(reader)
    names = {each.get_name() for each in inside}
    joined = [value for each in inside if each.get_type_name() == "Concat" for value in each.input_values()]
    return readers if all(value.get_node().get_name() in names for value in joined) else takers(node)


def over_last_axis(mvn: Any) -> bool:
    """Return whether a normalisation runs over the last axis.  OpenVINO's importer may write the axes as a Range."""
    axes = mvn.input_value(1).get_node()
    values = constant(mvn.input_value(1))
    if values is None and axes.get_type_name() == "Range":
        ends = [constant(axes.input_value(index)) for index in range(3)]
        values = None if any(end is None for end in ends) else np.arange(*(int(end.reshape(())) for end in ends))
    last = mvn.get_input_partial_shape(0).rank.get_length() - 1
    return values is not None and values.reshape(-1).tolist() in ([-1], [last])
