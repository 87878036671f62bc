"""Find constants of a quantised graph that do not fit the trained weights.

The weight of a projection in the quantised graph, dequantised, must be near the trained weight, times the factors by
which smoothing divided the LayerNorm before it. Rounding moves single values, but scales no channel: the regression of
a row (an output channel) or of a column (an input channel) on what it should be has a slope near 1. Exactly those
projections are quantised that the record does not leave in float32.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.graphs.quantize import output_axis, projections_named, projections_of, weight_matrix
from gmmvit_deploy.graphs.smoothing import smoothable_norms
from gmmvit_deploy.graphs.wiring import Wiring

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto, NodeProto

__all__ = ["quantized_faults", "quantized_range"]

_ROW_SLOPE, _COLUMN_SLOPE = 0.1, 0.4  # factors of smoothing are powers of two, so a missing one changes a slope by half
_RANGE, _SHIFT = 0.02, 0.01
_SMALL = 0.05
"""A row or column with a smaller norm, in norms of the largest, is mostly rounding, and has no slope to judge."""


def quantized_faults(
    quantized: ModelProto,
    plain: ModelProto,
    ranges: Mapping[str, tuple[float, float]],
    float32: Collection[str] = (),
    dynamic: Collection[str] = (),
) -> tuple[str, ...]:
    """Return a sentence for each projection or LayerNorm whose constants are wrong in the quantised graph.

    plain: the float32 graph from which ``quantized`` was made.  ranges: the recorded range of each activation.
    float32, dynamic: the recorded names of projections that are not quantised, or in the dynamic form, as in
    `quantize_graph`.
    """
    before, after = Wiring(plain.graph), Wiring(quantized.graph)
    now = {node.name: node for node in quantized.graph.node}
    factors: dict[str, NDArray[Any]] = {}
    faults = []
    not_quantized = projections_named(plain.graph, float32)
    for norm, readers in smoothable_norms(plain.graph):
        both = ((norm, before), (now[norm.name], after))
        olds, news = ([wiring.array(name) for name in node.input[1:]] for node, wiring in both)
        pairs = [(old, new) for old, new in zip(olds, news, strict=True) if old is not None and new is not None]
        factor = _factor(pairs)
        factors.update({node.name: factor for node in readers})
        if any((abs(new * factor - old) > _SHIFT * abs(old)).any() for old, new in pairs):
            faults.append(f"{norm.name}: smoothing divides its scale and its shift by different factors")
    for node in projections_of(plain.graph):
        stored = before.array(node.input[1])
        if stored is None:
            continue
        expected = weight_matrix(node, stored).astype(float) * factors.get(node.name, 1.0)
        name = now[node.name].input[1]
        in_float = after.array(name)
        if (in_float is not None) != (node.name in not_quantized):
            types = ("int8", "float32") if in_float is None else ("float32", "int8")
            faults.append(f"{node.name}: it multiplies in {types[0]}, and the record says {types[1]}")
            continue
        actual = weight_matrix(node, _dequantized(after, name, output_axis(node)) if in_float is None else in_float)
        columns, rows = (abs(_slopes(actual, expected, axis=axis) - 1) for axis in (0, 1))
        if node.name in factors and (columns > _COLUMN_SLOPE).any():
            faults.append(
                f"{node.name}: the weight of input channel {int(columns.argmax())} does not fit the LayerNorm before "
                "it: smoothing is folded into one of them only"
            )
        elif (rows > _ROW_SLOPE).any():
            faults.append(
                f"{node.name}: the scale of output channel {int(rows.argmax())} is wrong: its weight is not the "
                "trained weight"
            )
        static = after.maker[now[node.name].input[0]].op_type == "DequantizeLinear"
        if in_float is None and static == (node.name in dynamic):
            faults.append(f"{node.name}: its input has {'a' if static else 'no'} range, unlike the record")
        elif in_float is None and static:
            faults += _range_fault(node.name, now[node.name].input[0], ranges[node.input[0]], after)
    return tuple(faults)


def _factor(pairs: list[tuple[NDArray[Any], NDArray[Any]]]) -> NDArray[Any]:
    """Return the factor by which smoothing divided each channel of a norm: from the scale, or the shift where it is 0.

    pairs: the constants of the norm before and after: the scale, and the shift if there is one.
    """
    import numpy as np

    factor: NDArray[Any] = np.ones(pairs[0][0].shape)
    for old, new in reversed(pairs):
        factor = np.divide(old.astype(float), new, out=factor, where=(new != 0) & (old != 0))
    return factor


def _range_fault(name: str, activation: str, recorded: tuple[float, float], after: Wiring) -> list[str]:
    """Return a sentence if the range of an activation in the quantised graph is not the recorded range."""
    node = after.maker[activation]
    low, high = quantized_range(after, node)
    zero = after.initializers[node.input[2]]
    expected = recorded[1] - recorded[0] if zero.data_type == zero.UINT8 else 2 * max(-recorded[0], recorded[1])
    if abs((high - low) / expected - 1) <= _RANGE:
        return []
    return [f"{name}: its input saturates at {(high - low) / expected:.3g} times the range that calibration measured"]


def quantized_range(wiring: Wiring, node: NodeProto) -> tuple[float, float]:
    """Return the smallest and the largest value that a QuantizeLinear or DequantizeLinear node can represent."""
    import numpy as np
    from onnx import numpy_helper

    scale, zero = (numpy_helper.to_array(wiring.initializers[name]) for name in node.input[1:3])
    if zero.dtype == np.uint8:
        return float(-float(zero) * scale), float((255 - float(zero)) * scale)
    largest = float(scale) * (127 if zero.dtype == np.int8 else 448)
    return -largest, largest


def _dequantized(wiring: Wiring, name: str, axis: int) -> NDArray[Any]:
    """Return the float values of a weight behind a DequantizeLinear node."""
    from onnx import numpy_helper

    quantized, scale, _ = (numpy_helper.to_array(wiring.initializers[one]) for one in wiring.maker[name].input)
    shape = [-1 if index == axis else 1 for index in range(quantized.ndim)]
    values: NDArray[Any] = quantized.astype(float) * scale.astype(float).reshape(shape)
    return values


def _slopes(actual: NDArray[Any], expected: NDArray[Any], *, axis: int) -> NDArray[Any]:
    """Return the slope of the regression of ``actual`` on ``expected`` along an axis; 1 where ``expected`` is small."""
    import numpy as np

    squares = (expected**2).sum(axis)
    judged = squares > _SMALL**2 * squares.max(initial=0.0)
    slopes: NDArray[Any] = np.divide((actual * expected).sum(axis), squares, out=np.ones(len(squares)), where=judged)
    return slopes
