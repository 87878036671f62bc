"""SmoothQuant: divide each channel of a normalised activation by a factor, and multiply the weights by it.

    W x = (W · diag f) (diag f⁻¹ · x)        f = |x|ᵃ / |W|¹⁻ᵃ  for each channel, with the largest magnitudes of both

The strength a decides how much of the range moves from the activation to the weight. The division costs nothing: it is
folded into the scale and shift of the LayerNorm that makes x. Each factor is rounded to a power of two, which changes
only exponents, so the float32 network computes the same bits as before.

Source: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.graphs.quantize import output_axis, projections_of, weight_matrix
from gmmvit_deploy.graphs.wiring import Wiring, attribute_of, copy_of, order_of, rewrite_graph

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import GraphProto, ModelProto, NodeProto

__all__ = ["smoothable_norms", "smoothed"]

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
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in out.graph.initializer}
    factors: dict[str, NDArray[Any]] = {}
    values: dict[str, NDArray[Any]] = {}
    for norm, readers in smoothable_norms(out.graph):
        names, weights = {node.input[0] for node in readers}, {node.input[1]: node for node in readers}
        of_weights = np.max(
            [np.abs(weight_matrix(node, arrays[name])).max(0) for name, node in weights.items()], axis=0
        )
        of_values = np.max([largest[name] for name in names], axis=0)
        factor = np.maximum(of_values, _TINY) ** strength / np.maximum(of_weights, _TINY) ** (1 - strength)
        factor = (2.0 ** np.rint(np.log2(factor / np.exp(np.log(factor).mean())))).astype(np.float32)
        factors.update(dict.fromkeys(names, factor))
        for index, name in enumerate(norm.input):
            if index and name:  # other nodes may read the same constant
                norm.input[index] = f"{norm.name}.smoothed.{index}"
                values[norm.input[index]] = arrays[name] / factor
        for name, node in weights.items():
            values[name] = arrays[name] * (factor if output_axis(node) == 0 else factor[:, None])
    kept = [tensor for tensor in out.graph.initializer if tensor.name not in values]
    changed = [numpy_helper.from_array(value, name) for name, value in values.items()]
    rewrite_graph(out.graph, out.graph.node, [*kept, *changed], keep_shapes=True)
    return out, factors


def smoothable_norms(graph: GraphProto) -> list[tuple[NodeProto, list[NodeProto]]]:
    """Return each LayerNorm whose output only projections read, with these projections.

    The norm and the projections must have constants of their own, and rows may be moved between them.
    """
    wiring = Wiring(graph)
    projections, outputs = {node.name for node in projections_of(graph)}, {value.name for value in graph.output}
    norms = []
    for norm in graph.node:
        if norm.op_type != "LayerNormalization":
            continue
        found = list(_readers(wiring, norm.output[0], projections, outputs))
        readers = [node for node in found if node is not None]
        own = all(
            len(wiring.readers[node.input[1]]) == sum(other.input[1] == node.input[1] for other in readers)
            for node in readers
        )
        if (
            readers
            and len(readers) == len(found)
            and own
            and all(name in wiring.initializers for name in norm.input[1:])
        ):
            norms.append((norm, readers))
    return norms


def _readers(wiring: Wiring, name: str, projections: set[str], outputs: set[str]) -> Iterator[NodeProto | None]:
    """Yield the projections that read a tensor, also through nodes that only move rows; None for any other reader."""
    if name in outputs:
        yield None
    for node in wiring.readers.get(name, []):
        if node.name in projections and node.op_type != "Conv" and node.input[0] == name:
            yield node
        elif _moves_rows(wiring, node, name):
            yield from _readers(wiring, node.output[0], projections, outputs)
        else:
            yield None


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
