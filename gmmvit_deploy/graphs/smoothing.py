"""SmoothQuant: divide each channel of a normalised activation by a factor, and multiply the weights by it.

    W x = (W · diag f) (diag f⁻¹ · x)        f = |x|ᵃ / |W|¹⁻ᵃ  for each channel, with the largest magnitudes of both

The strength a decides how much of the range moves from the activation to the weight. The division costs nothing: it is
folded into the scale and shift of the LayerNorm that makes x. Each factor is rounded to a power of two, which changes
only exponents, so the float32 network computes the same bits as before, and measurements show no loss of quality.

Source: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.graphs.quantize import output_axis, projections_of, weight_matrix
from gmmvit_deploy.graphs.wiring import Wiring, attribute_of, copy_of, order_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto, NodeProto

__all__ = ["smoothed"]

_TINY = 1e-5


def smoothed(
    proto: ModelProto, largest: Mapping[str, NDArray[Any]], strength: float
) -> tuple[ModelProto, dict[str, NDArray[Any]]]:
    """Return a graph with the same outputs, in which the channels of projections' inputs have more equal ranges.

    largest: name of an activation → the largest magnitude of each channel, (C,).  strength: a, from 0 to 1.
    Returns (the graph, name of an activation → factor of each channel, (C,)). An activation without factors has no
    LayerNorm before it that only projections read.
    """
    import numpy as np
    from onnx import numpy_helper

    out = copy_of(proto)
    wiring = Wiring(out.graph)
    projections = {node.name for node in projections_of(out.graph)}
    factors: dict[str, NDArray[Any]] = {}
    values: dict[str, NDArray[Any]] = {}
    for norm in out.graph.node:
        if norm.op_type != "LayerNormalization" or attribute_of(norm, "axis", -1) != -1:
            continue
        readers = list(_readers(wiring, norm.output[0], projections))
        if not readers or None in readers:
            continue
        found = [node for node in readers if node is not None]
        names = {node.input[0] for node in found}
        weights = {node.input[1] for node in found}
        shared = any(len(wiring.readers[name]) != sum(node.input[1] == name for node in found) for name in weights)
        parameters = [name for name in norm.input[1:] if name]
        if shared or not names <= largest.keys() or any(name not in wiring.initializers for name in parameters):
            continue
        of_weights = np.max([np.abs(weight_matrix(node, wiring.array(node.input[1]))).max(0) for node in found], axis=0)
        of_values = np.max([largest[name] for name in names], axis=0)
        factor = np.maximum(of_values, _TINY) ** strength / np.maximum(of_weights, _TINY) ** (1 - strength)
        factor = (2.0 ** np.rint(np.log2(factor / np.exp(np.log(factor).mean())))).astype(np.float32)
        factors.update(dict.fromkeys(names, factor))
        for index, name in enumerate(norm.input):
            if index and name:  # other nodes may read the same constant
                norm.input[index] = f"{norm.name}.smoothed.{index}"
                values[norm.input[index]] = wiring.array(name) / factor
        for name in weights:
            node = next(node for node in found if node.input[1] == name)
            stored = wiring.array(name)
            values[name] = stored * (factor if output_axis(node) == 0 else factor[:, None])
    kept = [tensor for tensor in out.graph.initializer if tensor.name not in values]
    changed = [numpy_helper.from_array(value, name) for name, value in values.items()]
    del out.graph.initializer[:]
    out.graph.initializer.extend([*kept, *changed])
    return out, factors


def _readers(wiring: Wiring, name: str, projections: set[str]) -> Iterator[NodeProto | None]:
    """Yield the projections that read a tensor, also through nodes that only move rows; None for any other reader."""
    for node in wiring.readers.get(name, []):
        if node.name in projections and node.op_type != "Conv" and node.input[0] == name:
            yield node
        elif _moves_rows(wiring, node, name):
            yield from _readers(wiring, node.output[0], projections)
        else:
            yield None
    if not wiring.readers.get(name):
        yield None  # an output of the graph


def _moves_rows(wiring: Wiring, node: NodeProto, name: str) -> bool:
    """Return True if the node keeps the last axis of its first input, and reads no other computed tensor."""
    before, after = wiring.inner_shape(name), wiring.inner_shape(node.output[0])
    if wiring.computed_inputs(node) != [name] or before is None or after is None or before[-1] != after[-1]:
        return False
    rank = len(before) + 1
    if node.op_type == "Transpose":
        return order_of(node)[-1:] == [rank - 1]
    if node.op_type == "Gather":
        return attribute_of(node, "axis", 0) not in (-1, rank - 1)
    return node.op_type in ("Reshape", "Identity")
