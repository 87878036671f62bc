"""Run a float32 graph on real images, and collect a histogram of the input of every linear map, for calibration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.graphs.calibration import Histograms
from gmmvit_deploy.graphs.quantize import activations_of
from gmmvit_deploy.runtimes.programs.onnxruntime import session_from_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto

__all__ = ["calibrate"]


def calibrate(proto: ModelProto, batches: Iterable[NDArray[Any]]) -> Histograms:
    """Run a float32 graph on ``batches``, and collect a histogram of the absolute values of each linear map's input.

    proto: the float32 graph.  batches: batches (B, …) of the graph's input.
    Errors: InputError when there is no image, or a value is not finite.
    BundleError when ONNX Runtime cannot load the graph.
    """
    from onnx import TensorProto, helper

    probed = type(proto)()
    probed.CopyFrom(proto)
    names = activations_of(proto.graph)
    probed.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    session = session_from_bytes(probed.SerializeToString(), "the graph for calibration")
    (image,) = (value.name for value in proto.graph.input)
    histograms = Histograms()
    for batch in batches:
        for name, values in zip(names, session.run(list(names), {image: batch}), strict=True):
            histograms.add(name, values)
        histograms.images += len(batch)
    if not histograms.images:
        raise InputError(
            "calibration needs images, got no image", hint="type --calibration and a folder or an .npz of images"
        )
    return histograms
