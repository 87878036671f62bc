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
from gmmvit_deploy.graphs.wiring import (
    Constants,
    add_constant,
    inner_shape,
    input_of,
    order_of,
    remove_unused,
    stored,
    values_of,
)

if TYPE_CHECKING:
    import onnx_ir as ir

_TINY = 1e-5


def smoothed(
    model: ir.Model, largest: Mapping[str, NDArray[Any]], strength: float
) -> tuple[ir.Model, dict[str, NDArray[Any]]]:
    """Return a graph with the same outputs, in which the channels of projections' inputs have more equal ranges.

    largest: name of an activation → the largest magnitude of each channel, (C,).  strength: a, from 0 to 1.
    Returns (the graph, name of an activation → factor of each channel, (C,)). An activation without factors has no
    LayerNorm before it that only projections read.
    """
    factors: dict[str, NDArray[Any]] = {}
    of_norms: dict[str, NDArray[Any]] = {}
    for norm, readers in smoothable_norms(model.graph):
        names = {str(input_of(node, 0).name) for node in readers}
        of_weights = np.max([np.abs(weight_matrix(node, stored(node.inputs[1]))).max(0) for node in readers], 0)
        of_values = np.max([largest[name] for name in names], axis=0)
        factor = np.maximum(of_values, _TINY) ** strength / np.maximum(of_weights, _TINY) ** (1 - strength)
        factor = (2.0 ** np.rint(np.log2(factor / np.exp(np.log(factor).mean())))).astype(np.float32)
        # Nothing would show the factor of a channel that is always 0.
        factor[np.all([stored(value) == 0 for value in norm.inputs[1:]], axis=0)] = 1
        of_norms[str(norm.name)] = factor
        factors.update(dict.fromkeys(names, factor))
    return smoothed_by(model, of_norms), factors


def smoothed_by(model: ir.Model, factors: Mapping[str, NDArray[Any]]) -> ir.Model:
    """Return a graph with the same outputs, whose LayerNorms are divided by factors.

    factors: name of a norm of `smoothable_norms` → powers of two, (C,), by which its channels are divided.
    """
    import onnx_ir as ir

    out = model.clone()
    for norm, readers in smoothable_norms(out.graph):
        factor = factors[str(norm.name)]
        for index, value in enumerate(norm.inputs):
            if index and value is not None:  # other nodes may read the same constant
                smooth = add_constant(out.graph, f"{norm.name}.smoothed.{index}", stored(value) / factor)
                norm.replace_input_with(index, smooth)
        for weight, node in {input_of(node, 1): node for node in readers}.items():
            scaled = stored(weight) * (factor if output_axis(node) == 0 else factor[:, None])
            weight.const_value = ir.tensor(scaled, name=weight.name)
    remove_unused(out)
    return out


def factors_between(plain: ir.Graph, smooth: ir.Graph) -> dict[str, NDArray[Any]]:
    """Return the factors with which `smoothed_by` makes the LayerNorms of a graph from those of another.

    A channel that is always 0, or wrong in ``smooth``, has the factor 1.
    """
    named = {node.name: node for node in smooth}
    factors = {}
    for norm, _ in smoothable_norms(plain):
        factor = np.ones(stored(norm.inputs[1]).shape, np.float32)
        found = named[norm.name].inputs[1:] if norm.name in named else ()
        for old, new in reversed(list(zip(norm.inputs[1:], found, strict=False))):
            was, now = stored(old), values_of(new)
            if now is not None and now.shape == was.shape:
                ratio = np.divide(was, now, out=factor.copy(), where=(was != 0) & (now != 0))
                factor = np.exp2(np.rint(np.log2(np.abs(ratio), out=np.zeros_like(ratio), where=ratio > 0)))
        factors[str(norm.name)] = factor
    return factors


def smoothable_norms(graph: ir.Graph) -> list[tuple[ir.Node, list[ir.Node]]]:
    """Return each LayerNorm whose output only projections read, with these projections.

    The norm and the projections must have constants of their own, and rows may be moved between them.
    """
    constants, projections = Constants(graph), set(projections_of(graph))
    norms = []
    for norm in graph:
        if norm.op_type != "LayerNormalization":
            continue
        found = list(_readers(constants, norm.outputs[0], projections))
        readers = [node for node in found if node is not None]
        own = all(set(readers).issuperset(input_of(node, 1).consumers()) for node in readers)
        own &= all(values_of(value) is not None for value in norm.inputs[1:])
        if readers and len(readers) == len(found) and own:
            norms.append((norm, readers))
    return norms


def _readers(constants: Constants, value: ir.Value, projections: set[ir.Node]) -> Iterator[ir.Node | None]:
    """Yield the projections that read a tensor, also through nodes that only move rows; None for any other reader."""
    if value.is_graph_output():
        yield None
    for node, _ in value.uses():
        if node in projections and node.op_type != "Conv" and node.inputs[0] is value:
            yield node
        elif _moves_rows(constants, node, value):
            yield from _readers(constants, node.outputs[0], projections)
        else:
            yield None


def _moves_rows(constants: Constants, node: ir.Node, value: ir.Value) -> bool:
    """Whether the node keeps the last axis of its first input, and reads no other computed tensor."""
    before, after = inner_shape(value), inner_shape(node.outputs[0])
    if constants.computed(node) != [value] or before is None or after is None or before[-1] != after[-1]:
        return False
    rank = len(before) + 1
    if node.op_type == "Transpose":
        return order_of(node)[-1:] == [rank - 1]
    if node.op_type == "Gather":
        return node.attributes.get_int("axis", 0) not in (-1, rank - 1)
    return node.op_type in ("Reshape", "Identity")
