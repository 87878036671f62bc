"""Find the normalised image tensor in a graph that takes pixels and normalises them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import GraphProto

__all__ = ["end_of_normalisation"]

_CHANNELS_FIRST = [0, 3, 1, 2]


def end_of_normalisation(graph: GraphProto) -> str | None:
    """Return the name of the normalised tensor, or None if the graph does not begin with a normalisation.

    The normalisation is the path of nodes from the graph's input to the Transpose that moves the channels to the front.
    Each node on the path reads the tensor of the path and constants, and no other tensors. A single node reads each
    tensor of the path, apart from Shape nodes.
    """
    constants = {constant.name for constant in graph.initializer}
    name: str = graph.input[0].name
    for _ in range(len(graph.node)):
        # A Shape node reads only the batch size, and is not a step of the normalisation.
        users = [node for node in graph.node if name in node.input and node.op_type != "Shape"]
        if len(users) != 1 or any(other not in constants for other in users[0].input if other != name):
            return None
        (node,) = users
        name = node.output[0]
        if node.op_type == "Transpose":
            order = next((list(a.ints) for a in node.attribute if a.name == "perm"), [])
            return name if order == _CHANNELS_FIRST else None
    return None
