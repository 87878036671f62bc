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

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.graphs.quantize import output_axis, projections_of, weight_matrix
from gmmvit_deploy.graphs.wiring import Wiring, attribute_of, copy_of, order_of, rewrite_graph

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

_TINY = 1e-5


def smoothed(
    proto: ModelProto, largest: Mapping[str, NDArray[Any]], strength: float
) -> tuple[ModelProto, dict[str, NDArray[Any]]]:
    """Return a graph with the same outputs, in which the channels of projections' inputs have more equal ranges.

    largest: name of an activation → the largest magnitude of each channel, (C,).  strength: a, from 0 to 1.
    Returns (the graph, name of an activation → factor of each channel, (C,)). An activation without factors has no
    LayerNorm before it that only projections read.
    """
    wiring = Wiring(proto.graph)
    factors: dict[str, NDArray[Any]] = {}
    of_norms: dict[str, NDArray[Any]] = {}
    for norm, readers in smoothable_norms(proto.graph):
        names = {node.input[0] for node in readers}
        of_weights = np.max([np.abs(weight_matrix(node, wiring.stored(node.input[1]))).max(0) for node in readers], 0)
        of_values = np.max([largest[name] for name in names], axis=0)
        factor = np.maximum(of_values, _TINY) ** strength / np.maximum(of_weights, _TINY) ** (1 - strength)
        factor = (2.0 ** np.rint(np.log2(factor / np.exp(np.log(factor).mean())))).astype(np.float32)
        # Nothing would show the factor of a channel that is always 0.
        factor[np.all([wiring.stored(name) == 0 for name in norm.input[1:]], axis=0)] = 1
        of_norms[norm.name] = factor
        factors.update(dict.fromkeys(names, factor))
    return smoothed_by(proto, of_norms), factors


def smoothed_by(proto: ModelProto, factors: Mapping[str, NDArray[Any]]) -> ModelProto:
    """Return a graph with the same outputs, whose LayerNorms are divided by factors.

    factors: name of a norm of `smoothable_norms` → powers of two, (C,), by which its channels are divided.
    """
    from onnx import numpy_helper

    out = copy_of(proto)
    wiring = Wiring(out.graph)
    values: dict[str, NDArray[Any]] = {}
    for norm, readers in smoothable_norms(out.graph):
        factor = factors[norm.name]
        for index, name in enumerate(norm.input):
            if index and name:  # other nodes may read the same constant
                norm.input[index] = f"{norm.name}.smoothed.{index}"
                values[norm.input[index]] = wiring.stored(name) / factor
        for node in readers:
            weight = wiring.stored(node.input[1])
            values[node.input[1]] = weight * (factor if output_axis(node) == 0 else factor[:, None])
    kept = [tensor for tensor in out.graph.initializer if tensor.name not in values]
    changed = [numpy_helper.from_array(value, name) for name, value in values.items()]
    rewrite_graph(out.graph, out.graph.node, [*kept, *changed], keep_shapes=True)
    return out


def factors_between(plain: GraphProto, smooth: GraphProto) -> dict[str, NDArray[Any]]:
    """Return the factors with which `smoothed_by` makes the LayerNorms of a graph from those of another.

    A channel that is always 0, or wrong in ``smooth``, has the factor 1.
    """
    before, after = Wiring(plain), Wiring(smooth)
    named = {node.name: node for node in smooth.node}
    factors = {}
    for norm, _ in smoothable_norms(plain):
        factor = np.ones(before.stored(norm.input[1]).shape, np.float32)
        stored = named[norm.name].input[1:] if norm.name in named else ()
        for old, new in reversed(list(zip(norm.input[1:], stored, strict=False))):
            was, now = before.stored(old), after.array(new)
            if now is not None and now.shape == was.shape:
                ratio = np.divide(was, now, out=factor.copy(), where=(was != 0) & (now != 0))
                factor = np.exp2(np.rint(np.log2(np.abs(ratio), out=np.zeros_like(ratio), where=ratio > 0)))
        factors[norm.name] = factor
    return factors


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
        own &= all(name in wiring.initializers for name in norm.input[1:])
        if readers and len(readers) == len(found) and own:
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
    """Whether the node keeps the last axis of its first input, and reads no other computed tensor."""
    before, after = wiring.inner_shape(name), wiring.inner_shape(node.output[0])
    if wiring.computed_inputs(node) != [name] or before is None or after is None or before[-1] != after[-1]:
        return False
    rank = len(before) + 1
    if node.op_type == "Transpose":
        return order_of(node)[-1:] == [rank - 1]
    if node.op_type == "Gather":
        return attribute_of(node, "axis", 0) not in (-1, rank - 1)
    return node.op_type in ("Reshape", "Identity")
