"""Run a graph of any precision on the CPU, with every rounding that the graph contains.

ONNX Runtime computes float16 nodes in float32 and rounds the results. With optimisation turned off, ONNX Runtime omits
no rounding. ONNX Runtime cannot compute bfloat16 nodes on a CPU, so `graphs/emulate.py` rewrites bfloat16 nodes in
float32 and rounds each result to bfloat16. The order in which a matrix product adds its terms is not emulated, because
this order differs between GPU kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gmmvit_deploy.graphs.emulate import with_quantized_activations, without_bfloat16
from gmmvit_deploy.graphs.quantized_faults import quantized_range
from gmmvit_deploy.graphs.wiring import Wiring, copy_of
from gmmvit_deploy.runtimes.programs.onnxruntime import session_from_proto

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto

__all__ = ["emulated_logits", "emulated_outputs", "saturated_shares"]


def emulated_logits(proto: ModelProto, inputs: NDArray[Any], *, name: str) -> NDArray[Any]:
    """Compute the first output of `emulated_outputs`, the float32 logits (B, C)."""
    return emulated_outputs(proto, inputs, name=name)[0]


def emulated_outputs(proto: ModelProto, inputs: NDArray[Any], *, name: str, batch: int = 8) -> tuple[NDArray[Any], ...]:
    """Compute the float32 outputs (B, …) of a graph with every rounding of the graph.

    proto: the graph.  inputs: B inputs of the graph, (B, …).  name: the graph's name in error messages.
    batch: the number of inputs that run at once.
    Errors: BundleError when ONNX Runtime cannot load the graph.
    """
    import numpy as np

    session = session_from_proto(with_quantized_activations(without_bfloat16(proto)), name, exact=True)
    (image,) = (value.name for value in proto.graph.input)
    parts = [session.run(None, {image: inputs[i : i + batch]}) for i in range(0, len(inputs), batch)]
    return tuple(np.concatenate(rows) for rows in zip(*parts, strict=True))


def saturated_shares(proto: ModelProto, inputs: NDArray[Any], *, name: str) -> dict[str, float]:
    """Return the name of each projection → the share of its input's values that saturate in a quantised graph.

    The arguments are as in `emulated_outputs`.  A value that exceeds the range by less than half a step is rounded.
    """
    import numpy as np
    from onnx import ValueInfoProto

    probed = copy_of(without_bfloat16(proto))
    wiring = Wiring(probed.graph)
    nodes = [node for node in probed.graph.node if node.op_type == "QuantizeLinear"]
    names = list(dict.fromkeys(node.input[0] for node in nodes))
    del probed.graph.output[:]
    probed.graph.output.extend(ValueInfoProto(name=one) for one in names)
    beyond = dict.fromkeys((node.name for node in nodes), 0)
    counts = dict(beyond)
    session = session_from_proto(probed, name, exact=True)
    (image,) = (value.name for value in probed.graph.input)
    for start in range(0, len(inputs), 8):
        values = dict(zip(names, session.run(names, {image: inputs[start : start + 8]}), strict=True))
        for node in nodes:
            low, high = quantized_range(wiring, node)
            x, half = values[node.input[0]], (high - low) / 510
            beyond[node.name] += int(np.count_nonzero((x < low - half) | (x > high + half)))
            counts[node.name] += x.size
    return {one.removesuffix("/QuantizeLinear"): beyond[one] / counts[one] for one in beyond}
