"""Read inner tensors of a graph in ONNX Runtime, by adding the requested tensors to the graph's outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import BundleError
from gmmvit_deploy.graphs.emulate import without_bfloat16
from gmmvit_deploy.runtimes.programs.onnxruntime import session_from_model, with_outputs
from gmmvit_deploy.runtimes.runners.runner import InspectableGraph, Inspection

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

    from gmmvit_deploy.bundle.variants import Variant

LOGITS = "logits"
"""The key of the first output among the tensors of an inspected graph, also if the output is called features."""
_NAMED = "{}, with the outputs of its blocks as additional outputs"


def inspectable_in_onnxruntime(
    name: str, model: ir.Model, open_session: Callable[[ir.Model, str], Any] = session_from_model
) -> InspectableGraph:
    """Make a graph inspectable in ONNX Runtime.  name: in reports.  open_session: as `session_from_model`."""
    return InspectableGraph(name=name, model=model, values=partial(_values, model, open_session, name))


def stand_in(variant: Variant, why_not: str) -> Inspection:
    """Return the bundle's graph, unchanged, in ONNX Runtime, in place of a program that cannot be inspected."""
    import onnx_ir as ir

    return Inspection(inspectable_in_onnxruntime(variant.path.name, ir.load(variant.path)), why_not)


def _values(
    model: ir.Model,
    open_session: Callable[[ir.Model, str], Any],
    name: str,
    inputs: NDArray[Any],
    tensors: Sequence[str],
) -> dict[str, NDArray[Any]]:
    # ONNX Runtime has no bfloat16 operators on a CPU, so bfloat16 is emulated in float32.
    tapped = with_outputs(without_bfloat16(model), sorted(set(tensors)))
    session = open_session(tapped, _NAMED.format(name))
    (image,) = (value.name for value in model.graph.inputs)
    names = {name: name for name in tensors} | {LOGITS: model.graph.outputs[0].name}
    try:
        return dict(zip(names, session.run([*names.values()], {image: inputs}), strict=True))
    # ONNX Runtime raises its own exception classes, which have no common base.
    except Exception as exc:
        raise BundleError(f"{_NAMED.format(name)}: ONNX Runtime cannot run the graph: {str(exc).strip()}") from exc
