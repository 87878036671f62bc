"""The part of a graph that turns pixels into a normalised tensor, run by itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.runtime.onnxruntime import session_from_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import GraphProto

__all__ = ["normalised_in_graph"]

_CHANNELS_FIRST = [0, 3, 1, 2]


def normalised_in_graph(path: Path, pixels: NDArray[Any]) -> NDArray[Any] | None:
    """uint8 (B, height, width, channels) → float32 (B, channels, height, width) as the graph computes it.

    None when it has no such part.
    """
    import onnx

    proto = onnx.load(path)
    name = _end_of_normalisation(proto.graph)
    if name is None:
        return None
    (image,) = (one.name for one in proto.graph.input)
    del proto.graph.output[:]
    proto.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    session = session_from_bytes(proto.SerializeToString(), path.name, exact=True)
    tensor: NDArray[Any] = session.run([name], {image: pixels})[0]
    return tensor


def _end_of_normalisation(graph: GraphProto) -> str | None:
    """Follow the one way that the input takes until channels come first."""
    constants = {one.name for one in graph.initializer}
    name: str = graph.input[0].name
    for _ in range(len(graph.node)):
        # The batch size may be read off the input as well; that is no step of the way.
        users = [node for node in graph.node if name in node.input and node.op_type != "Shape"]
        if len(users) != 1 or any(other not in constants for other in users[0].input if other != name):
            return None
        (node,) = users
        name = node.output[0]
        if node.op_type == "Transpose":
            order = next((list(a.ints) for a in node.attribute if a.name == "perm"), [])
            return name if order == _CHANNELS_FIRST else None
    return None
