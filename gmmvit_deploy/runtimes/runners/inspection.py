"""Read inner tensors of a graph in ONNX Runtime, by adding the requested tensors to the graph's outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import BundleError
from gmmvit_deploy.graphs.emulate import without_bfloat16
from gmmvit_deploy.graphs.weights import without_weights
from gmmvit_deploy.runtimes.programs.onnxruntime import session_from_proto
from gmmvit_deploy.runtimes.runners.runner import InspectableGraph, Inspection

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto

    from gmmvit_deploy.bundle.variants import Variant

LOGITS = "logits"
"""The key of the first output among the tensors of an inspected graph, also if the output is called features."""
_NAMED = "{}, with the outputs of its blocks as additional outputs"


def inspectable_in_onnxruntime(
    name: str, proto: ModelProto, open_session: Callable[[ModelProto, str], Any] = session_from_proto
) -> InspectableGraph:
    """Make a graph inspectable in ONNX Runtime.

    name: name of the graph in reports.
    open_session: function that takes a graph and the name of the graph in errors, and returns a session with all
    operators of the graph.
    """
    return InspectableGraph(name=name, proto=proto, values=partial(_values, proto, open_session, name))


def stand_in(variant: Variant, why_not: str) -> Inspection:
    """Return the bundle's graph, unchanged, in ONNX Runtime, in place of a program that cannot be inspected.

    variant: the graph.  why_not: the reason why the program cannot be inspected.
    """
    import onnx

    return Inspection(inspectable_in_onnxruntime(variant.path.name, onnx.load(variant.path)), why_not)


def _values(
    proto: ModelProto,
    open_session: Callable[[ModelProto, str], Any],
    name: str,
    inputs: NDArray[Any],
    tensors: Sequence[str],
) -> dict[str, NDArray[Any]]:
    """Run the graph and return the named tensors and the logits: name → array."""
    # ONNX Runtime has no bfloat16 operators on a CPU, so bfloat16 is emulated in float32.
    tapped = without_bfloat16(_with_outputs(proto, tensors))
    session = open_session(tapped, _NAMED.format(name))
    (image,) = (value.name for value in proto.graph.input)
    names = {name: name for name in tensors} | {LOGITS: proto.graph.output[0].name}
    try:
        return dict(zip(names, session.run([*names.values()], {image: inputs}), strict=True))
    # ONNX Runtime raises its own exception classes, which have no common base.
    except Exception as exc:
        raise BundleError(f"{_NAMED.format(name)}: ONNX Runtime cannot run the graph: {str(exc).strip()}") from exc


def _with_outputs(proto: ModelProto, tensors: Sequence[str]) -> ModelProto:
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    present = {output.name for output in copy.graph.output}
    for tensor in sorted(set(tensors) - present):
        copy.graph.output.append(onnx.ValueInfoProto(name=tensor))
    # The ONNX checker requires that the graph states the types of outputs. ONNX Runtime infers these types.
    inferred = {
        value.name: value for value in onnx.shape_inference.infer_shapes(without_weights(proto)).graph.value_info
    }
    for output in copy.graph.output:
        if output.name in inferred:
            output.CopyFrom(inferred[output.name])
    return copy
