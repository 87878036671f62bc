"""Looking around in OpenVINO's graphs.  Imports nothing of ours: a server's model brings this file along.

Values are outputs of nodes. Conversions of type, which a graph of half precision is full of, are looked through where
their name is given.
"""

from __future__ import annotations

from typing import Any

__all__ = ["constant", "constant_and_other", "down", "nodes_of", "permutes", "static", "takers", "up"]


def nodes_of(model: Any, kind: str) -> list[Any]:
    return [node for node in model.get_ordered_ops() if node.get_type_name() == kind]


def permutes(node: Any, *orders: list[int]) -> bool:
    """Is it a Transpose to one of these orders?"""
    found = constant(node.input_value(1)) if node.get_type_name() == "Transpose" else None
    return found is not None and found.reshape(-1).tolist() in orders


def constant_and_other(node: Any, kind: str) -> tuple[Any, Any] | None:
    """(the constant, the other input) of a node of this kind that has one constant input."""
    if node.get_type_name() != kind:
        return None
    values = [constant(node.input_value(index)) for index in (0, 1)]
    if (values[0] is None) == (values[1] is None):
        return None
    index = 0 if values[0] is not None else 1
    return values[index], node.input_value(1 - index)


def constant(value: Any) -> Any:
    node = up(value, "Convert").get_node()
    return node.data if node.get_type_name() == "Constant" else None


def up(value: Any, through: str) -> Any:
    while value.get_node().get_type_name() == through:
        value = value.get_node().input_value(0)
    return value


def down(node: Any, through: str = "") -> Any:
    """The one node that takes what this one gives; None where several do."""
    targets = list(node.output(0).get_target_inputs())
    if len(targets) != 1:
        return None
    taker = targets[0].get_node()
    return down(taker, through) if taker.get_type_name() == through else taker


def static(value: Any) -> list[int]:
    """The shape, the batch as −1 whatever it is."""
    shape = value.get_partial_shape()
    rest = [] if shape.rank.is_dynamic else list(shape)[1:]
    return [-1, *(one.get_length() if one.is_static else -2 for one in rest)]


def takers(node: Any) -> list[Any]:
    """The nodes that take what this one gives, through conversions."""
    found = []
    for target in node.output(0).get_target_inputs():
        taker = target.get_node()
        found += takers(taker) if taker.get_type_name() == "Convert" else [taker]
    return found
