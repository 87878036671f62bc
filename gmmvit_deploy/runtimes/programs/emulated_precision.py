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
from gmmvit_deploy.graphs.wiring import input_of
from gmmvit_deploy.runtimes.programs.onnxruntime import session_from_model, with_outputs

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray
_BATCH = 8  # the inputs that run at once


def emulated_logits(model: ir.Model, inputs: NDArray[Any], *, name: str) -> NDArray[Any]:
    """Compute the first output of `emulated_outputs`, the float32 logits (B, C)."""
    return emulated_outputs(model, inputs, name=name)[0]


def emulated_outputs(model: ir.Model, inputs: NDArray[Any], *, name: str) -> tuple[NDArray[Any], ...]:
    """Compute the float32 outputs (B, …) of a graph with every rounding of the graph.  inputs: (B, …).

    name: the graph's name in error messages.  Errors: BundleError when ONNX Runtime cannot load the graph.
    """
    import numpy as np

    session = session_from_model(with_quantized_activations(without_bfloat16(model)), name, exact=True)
    (image,) = (value.name for value in model.graph.inputs)
    parts = [session.run(None, {image: inputs[i : i + _BATCH]}) for i in range(0, len(inputs), _BATCH)]
    return tuple(np.concatenate(rows) for rows in zip(*parts, strict=True))


class CountedGraph:
    """A quantised graph that runs with every rounding, and counts the values that saturate."""

    def __init__(self, model: ir.Model, *, name: str) -> None:
        """Arguments and errors: as `emulated_outputs`."""
        graph = with_quantized_activations(without_bfloat16(model))
        (self._image,) = (value.name for value in graph.graph.inputs)
        nodes = {str(node.name): node for node in graph.graph if node.op_type == "QuantizeLinear"}
        self._ranges = {name: quantized_range(node) for name, node in nodes.items()}
        self._read = {name: input_of(node, 0).name for name, node in nodes.items()}
        self._names = list(dict.fromkeys([graph.graph.outputs[0].name, *self._read.values()]))
        self._session = session_from_model(with_outputs(graph, self._names), name, exact=True)
        self._beyond = dict.fromkeys(self._ranges, 0)
        self._counts = dict.fromkeys(self._ranges, 0)

    def logits(self, inputs: NDArray[Any], counted: NDArray[Any] | None = None) -> NDArray[Any]:
        """Compute the first output (B, C).

        counted: (B,), True for the inputs whose saturated values are counted; None counts none.
        """
        import numpy as np

        rows = []
        for start in range(0, len(inputs), _BATCH):
            answers = self._session.run(self._names, {self._image: inputs[start : start + _BATCH]})
            values = dict(zip(self._names, answers, strict=True))
            rows.append(answers[0])
            if counted is None:
                continue
            for name, (low, high) in self._ranges.items():
                # A value that exceeds the range by less than half a step is rounded.
                x, half = values[self._read[name]][counted[start : start + _BATCH]], (high - low) / 510
                self._beyond[name] += int(np.count_nonzero((x < low - half) | (x > high + half)))
                self._counts[name] += x.size
        return np.concatenate(rows)

    def saturated(self) -> dict[str, float]:
        """Return the name of each projection → the share of its input's counted values that saturate."""
        return {
            name.removesuffix("/QuantizeLinear"): self._beyond[name] / max(count, 1)
            for name, count in self._counts.items()
        }
