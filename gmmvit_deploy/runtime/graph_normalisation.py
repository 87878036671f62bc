"""Run the part of a graph that turns pixels into a normalised tensor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.graphs.normalisation import end_of_normalisation
from gmmvit_deploy.runtime.onnxruntime import session_from_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["normalised_in_graph"]


def normalised_in_graph(path: Path, pixels: NDArray[Any]) -> NDArray[Any] | None:
    """uint8 (B, height, width, channels) → float32 (B, channels, height, width) as the graph computes it.

    None when the graph has no such part.
    """
    import onnx

    proto = onnx.load(path)
    name = end_of_normalisation(proto.graph)
    if name is None:
        return None
    (image,) = (one.name for one in proto.graph.input)
    del proto.graph.output[:]
    proto.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    session = session_from_bytes(proto.SerializeToString(), path.name, exact=True)
    tensor: NDArray[Any] = session.run([name], {image: pixels})[0]
    return tensor
