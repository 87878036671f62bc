"""Read OpenVINO's graphs, and implement the matcher's `GraphView` for OpenVINO graphs.

A value is an output of a node. A function with a parameter ``through`` skips nodes of the type ``through``. For
example, a graph in half precision has many Convert nodes, which are casts.

``gmmvit repository`` copies this file into the folder of a served model, so this file imports no module of this
project.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "OpenVinoView",
    "constant",
    "constant_and_other",
    "down",
    "nodes_of",
    "static",
    "takers",
    "takers_behind_layout",
    "up",
]

_KINDS = {
    "Add": "addition",
    "Convert": "cast",
    "Multiply": "multiplication",
    "Reshape": "reshape",
    "Softmax": "softmax",
    "Transpose": "transpose",
}
_MOVE_VALUES = {"Concat", "Reshape", "Slice", "Split", "StridedSlice", "Transpose", "VariadicSplit"}


class OpenVinoView:
    """An OpenVINO graph as a `GraphView`.  A value is an output of a node.  Our kernel for OpenVINO ignores casts."""

    def __init__(self, model: Any) -> None:
        self._model = model  # the nodes exist only as long as the model does
        self._softmaxes = [node.output(0) for node in nodes_of(model, "Softmax")]

    def softmaxes(self) -> list[Any]:
        return self._softmaxes

    def name(self, value: Any) -> str:
        return str(value.get_node().get_friendly_name())

    def kind(self, value: Any) -> str:
        node = value.get_node()
        name = str(node.get_type_name())
        if name == "MatMul":
            attributes = node.get_attributes()
            transposes = attributes.get("transpose_a") or attributes.get("transpose_b")
            return "MatMul that transposes an input" if transposes else "matrix product"
        return _KINDS.get(name, name)

    def inputs(self, value: Any) -> list[Any]:
        return list(value.get_node().input_values())

    def constant(self, value: Any) -> Any:
        return constant(value)

    def plain(self, value: Any) -> Any:
        return up(value, "Convert")

    def reader(self, value: Any, *, through_casts: bool = False) -> Any:
        taker = down(value.get_node(), "Convert" if through_casts else "")
        return None if taker is None or not taker.outputs() else taker.output(0)

    def readers(self, value: Any) -> list[str]:
        return [self.kind(taker.output(0)) for taker in takers(value.get_node()) if taker.outputs()]

    def shape(self, value: Any) -> tuple[int, ...] | None:
        _, *inner = static(value)
        return tuple(inner) if inner and min(inner) > 0 else None

    def fixed_batch(self, value: Any) -> int | None:
        batch, *_ = value.get_partial_shape()
        return batch.get_length() if batch.is_static else None

    def target(self, value: Any) -> tuple[int, ...] | None:
        return self.shape(value)

    def order(self, value: Any) -> list[int]:
        order = constant(value.get_node().input_value(1))
        return [] if order is None else [int(axis) for axis in order.reshape(-1)]

    def axis(self, value: Any) -> int:
        return int(value.get_node().get_attributes().get("axis", 1))

    def columns(self, value: Any) -> tuple[Any, int, int] | None:
        node, shape = value.get_node(), self.shape(value)
        axis = constant(node.input_value(1)) if node.get_type_name() == "Split" else None
        if axis is None or shape is None or int(axis.reshape(())) not in (-1, len(shape)):
            return value, 0, 1
        return node.input_value(0), value.get_index(), len(node.outputs())

    def refused_type(self, value: Any) -> str:
        return ""

    def takes_constant(self, array: Any) -> bool:
        return True


def nodes_of(model: Any, kind: str) -> list[Any]:
    """Return the nodes of the type ``kind``, in topological order."""
    return [node for node in model.get_ordered_ops() if node.get_type_name() == kind]


def constant_and_other(node: Any, kind: str) -> tuple[Any, Any] | None:
    """Return (the constant input, the other input) of a node.

    Returns None if the node is of another type than ``kind``, or has not exactly 1 constant input.
    """
    if node.get_type_name() != kind:
        return None
    values = [constant(node.input_value(index)) for index in (0, 1)]
    if (values[0] is None) == (values[1] is None):
        return None
    index = 0 if values[0] is not None else 1
    return values[index], node.input_value(1 - index)


def constant(value: Any) -> Any:
    """Return a constant, also behind casts, as a numpy array; None for a computed value."""
    node = up(value, "Convert").get_node()
    return node.data if node.get_type_name() == "Constant" else None


def up(value: Any, through: str) -> Any:
    """Return the value before the nodes of type ``through`` that compute this value."""
    while value.get_node().get_type_name() == through:
        value = value.get_node().input_value(0)
    return value


def down(node: Any, through: str = "") -> Any:
    """Return the only node that reads the output of ``node``, or None if several nodes or no node read the output.

    through: skip nodes of this type, if each has a single reader.
    """
    targets = list(node.output(0).get_target_inputs())
    if len(targets) != 1:
        return None
    taker = targets[0].get_node()
    return down(taker, through) if taker.get_type_name() == through else taker


def static(value: Any) -> list[int]:
    """Return the shape of a value, with −1 for the batch and −2 for any other unknown dimension."""
    shape = value.get_partial_shape()
    rest = [] if shape.rank.is_dynamic else list(shape)[1:]
    return [-1, *(dimension.get_length() if dimension.is_static else -2 for dimension in rest)]


def takers(node: Any) -> list[Any]:
    """Return the nodes that read the output of ``node``; casts are skipped."""
    readers = []
    for target in node.output(0).get_target_inputs():
        taker = target.get_node()
        readers += takers(taker) if taker.get_type_name() == "Convert" else [taker]
    return readers


def takers_behind_layout(node: Any) -> list[Any]:
    """Return the nodes that read the output of ``node``, also behind nodes that only move values, such as a Transpose.

    Returns the result of `takers` if a Concat would join the values with those of another node.
    """
    inside: list[Any] = [node]
    readers: list[Any] = []
    for each in inside:  # grows
        for target in (target for output in each.outputs() for target in output.get_target_inputs()):
            reader = target.get_node()
            if reader.get_type_name() == "Convert":  # of the last values: it is not moved
                readers += takers(reader)
            elif reader.get_type_name() not in _MOVE_VALUES:
                readers.append(reader)
            elif reader.get_name() not in {each.get_name() for each in inside}:
                inside.append(reader)
    names = {each.get_name() for each in inside}
    joined = [value for each in inside if each.get_type_name() == "Concat" for value in each.input_values()]
    alone = all(value.get_node().get_name() in names for value in joined)
    return readers if alone and len(inside) > 1 else takers(node)
