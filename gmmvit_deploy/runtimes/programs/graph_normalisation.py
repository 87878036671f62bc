"""Run only the part of a graph that normalises pixels, without the network that follows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.graphs.wiring import end_of_normalisation
from gmmvit_deploy.runtimes.programs.onnxruntime import session_from_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["normalised_in_graph"]


def normalised_in_graph(path: Path, pixels: NDArray[Any]) -> NDArray[Any] | None:
    """Normalise pixels with the nodes of the graph.

    path: the graph's ONNX file.  pixels: uint8 (B, height, width, channels).
    Returns float32 (B, channels, height, width), or None if the graph does not normalise.
    Errors: BundleError when ONNX Runtime cannot load the graph.
    """
    import onnx

    proto = onnx.load(path)
    name = end_of_normalisation(proto.graph)
    if name is None:
        return None
    (image,) = (value.name for value in proto.graph.input)
    del proto.graph.output[:]
    proto.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    session = session_from_bytes(proto.SerializeToString(), path.name, exact=True)
    tensor: NDArray[Any] = session.run([name], {image: pixels})[0]
    return tensor
