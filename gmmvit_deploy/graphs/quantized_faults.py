"""Find constants of a quantised graph that do not fit the trained weights.

The weight of a projection in the quantised graph, dequantised, must be near the trained weight, times the factors by
which smoothing divided the LayerNorm before it. Rounding moves single values, but scales no channel: the regression of
a row (an output channel) or of a column (an input channel) on what it should be has a slope near 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.graphs.quantize import output_axis, projections_of, weight_matrix
from gmmvit_deploy.graphs.smoothing import smoothable_norms
from gmmvit_deploy.graphs.wiring import Wiring

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto

__all__ = ["quantized_faults"]

_ROW_SLOPE, _COLUMN_SLOPE = 0.1, 0.4  # factors of smoothing are powers of two, so a missing one changes a slope by half
_RANGE = 0.02


def quantized_faults(
    quantized: ModelProto, plain: ModelProto, ranges: Mapping[str, tuple[float, float]]
) -> tuple[str, ...]:
    """Return a sentence for each projection whose quantised constants are wrong.

    plain: the float32 graph from which ``quantized`` was made.  ranges: the recorded range of each activation.
    """
    import numpy as np

    before, after = Wiring(plain.graph), Wiring(quantized.graph)
    now = {node.name: node for node in quantized.graph.node}
    factors: dict[str, NDArray[Any]] = {}
    for norm, readers in smoothable_norms(plain.graph):
        old, new = before.array(norm.input[1]), after.array(now[norm.name].input[1])
        if old is not None and new is not None and new.shape == old.shape:
            factor = np.divide(old, new, out=np.ones(old.shape), where=new != 0)
            factors.update({node.name: factor for node in readers})
    faults = []
    for node in projections_of(plain.graph):
        stored = before.array(node.input[1])
        if stored is None:
            continue
        expected = weight_matrix(node, stored).astype(float)
        if node.op_type != "Conv":
            expected = expected * factors.get(node.name, 1.0)
        actual = weight_matrix(node, _dequantized(after, now[node.name].input[1], output_axis(node)))
        columns, rows = (_slopes(actual, expected, axis=axis) for axis in (0, 1))
        if (np.abs(columns - 1) > _COLUMN_SLOPE).any():
            worst = int(np.abs(columns - 1).argmax())
            faults.append(
                f"{node.name}: the weight of input channel {worst} is {columns[worst]:.3g} times what the LayerNorm "
                "before it needs: smoothing is folded into one of them only"
            )
        elif (np.abs(rows - 1) > _ROW_SLOPE).any():
            worst = int(np.abs(rows - 1).argmax())
            faults.append(
                f"{node.name}: the weight of output channel {worst} is {rows[worst]:.3g} times the trained weight: "
                "its scale is wrong"
            )
        faults += _range_fault(node.name, now[node.name].input[0], ranges[node.input[0]], after)
    return tuple(faults)


def _range_fault(name: str, activation: str, recorded: tuple[float, float], after: Wiring) -> list[str]:
    """Return a sentence if the range of an activation in the quantised graph is not the recorded range."""
    import numpy as np

    _, scale, zero = (after.array(constant) for constant in after.maker[activation].input)
    if scale is None or zero is None or zero.dtype.kind not in "iu":
        return []
    most = np.iinfo(zero.dtype).max
    actual, expected = (
        float(scale) * most,
        recorded[1] - recorded[0] if zero.dtype.kind == "u" else max(-recorded[0], recorded[1]),
    )
    if abs(actual / expected - 1) <= _RANGE:
        return []
    return [f"{name}: its input saturates at {actual / expected:.3g} times the range that calibration measured"]


def _dequantized(wiring: Wiring, name: str, axis: int) -> NDArray[Any]:
    """Return the float values of a weight behind a DequantizeLinear node."""
    from onnx import numpy_helper

    quantized, scale, _ = (numpy_helper.to_array(wiring.initializers[one]) for one in wiring.maker[name].input)
    shape = [-1 if index == axis else 1 for index in range(quantized.ndim)]
    values: NDArray[Any] = quantized.astype(float) * scale.astype(float).reshape(shape)
    return values


def _slopes(actual: NDArray[Any], expected: NDArray[Any], *, axis: int) -> NDArray[Any]:
    """Return the slope of the regression of ``actual`` on ``expected`` along an axis; 1 where ``expected`` is 0."""
    import numpy as np

    squares = (expected**2).sum(axis)
    slopes: NDArray[Any] = np.divide(
        (actual * expected).sum(axis), squares, out=np.ones(len(squares)), where=squares > 0
    )
    return slopes
