"""Quantise the projections of a graph to int8 or fp8.

    Q(x) = saturate(round(x / s)),  DQ(q) = q · s

Q is the operator QuantizeLinear, and DQ is the operator DequantizeLinear. A projection is a linear map of the role
``projection`` (`roles`). Each weight has a scale per output channel and the zero point 0. Each activation has a scale s
from calibration. For int8 on CPUs, a range that is far from symmetric also has a zero point z, and uses all steps:

    Q(x) = saturate(round(x / s) + z),  DQ(q) = (q − z) · s,  with 0 ≤ q ≤ 255

These operators are not quantised:

- the first linear map, which reads the image, and the head, because both matter for accuracy and take little time;
- the matrix products of attention, where Q/DQ would prevent a fused kernel;
- depthwise convolutions and biases;
- projections that the caller leaves in float32.

A projection is quantised in one of two forms, and a graph can hold both:

- static: a Q/DQ pair on the activation and on the weight;
- dynamic, for projections that are not convolutions: a DQ node on the weight only. OpenVINO quantises the activation
  while it runs, with a scale for each row and `DYNAMIC_COLUMNS` columns. This needs no calibration, and saturates
  nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.graphs.cast import numpy_type
from gmmvit_deploy.graphs.declared import declare
from gmmvit_deploy.graphs.roles import roles_of
from gmmvit_deploy.graphs.wiring import add_constant, input_of, remove_unused, stored
from gmmvit_deploy.inference.precision import SPECS, Precision

if TYPE_CHECKING:
    import onnx_ir as ir


DYNAMIC = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
"""The key in the metadata of a graph in the dynamic form, which holds `DYNAMIC_COLUMNS`.  It is OpenVINO's property."""
DYNAMIC_COLUMNS = 64
"""Measured with DINOv2 ViT-S/14, 32 to 384: each doubling loses 0.1 dB, and 64 and 128 are the fastest."""
_STEPS = 255  # of an activation with a zero point
_MAX_USED = 0.75
"""An activation gets a zero point if its range is a smaller part of the symmetric range, as after GELU."""
_PART = re.compile(r"\.parts\.\d+(?=/)")
_SMALLEST_SCALE = 2.0**-24  # the smallest positive float16; scales are stored as float16


def activations_of(graph: ir.Graph) -> tuple[str, ...]:
    """Return the names of the tensors that projections read as activations, each once, in the order of the graph."""
    return tuple(dict.fromkeys(str(input_of(node, 0).name) for node in projections_of(graph)))


def projections_of(graph: ir.Graph) -> list[ir.Node]:
    """Return the nodes that are quantised, in the order of the graph."""
    roles = roles_of(graph)
    return [node for node in graph if roles[node] == "projection"]


def projections_named(graph: ir.Graph, names: Collection[str]) -> set[str]:
    """Return the names of the projections that the graph for CPUs calls ``names``.

    In a graph for GPUs, a projection to queries, keys and values can be separate projections: its parts.
    """
    return {name for node in projections_of(graph) if _PART.sub("", name := str(node.name)) in names}


def can_be_dynamic(projections: Iterable[ir.Node]) -> list[str]:
    """Return the names of the projections whose input OpenVINO quantises while it runs: all but convolutions."""
    return [str(node.name) for node in projections if node.op_type != "Conv"]


def output_axis(projection: ir.Node) -> int:
    """Return 0 or 1, the index of the weight's dimension that holds the output channels."""
    if projection.op_type == "Conv":
        return 0
    return 0 if projection.attributes.get_int("transB", 0) else 1


def weight_matrix(projection: ir.Node, weight: NDArray[Any]) -> NDArray[Any]:
    """Return the weight of a projection as a matrix (out, in)."""
    return weight.reshape(len(weight), -1) if output_axis(projection) == 0 else weight.T


def weight_scales(matrix: NDArray[Any], precision: Precision) -> NDArray[Any]:
    """Return the scale of each row of a weight (out, in)."""
    return _scales(np.abs(matrix).max(axis=1), precision)


def _scales(largest: NDArray[Any], precision: Precision) -> NDArray[Any]:
    """Return the scales at which the magnitudes ``largest`` become the largest quantised value, as float16."""
    scales = np.maximum(np.asarray(largest, np.float64) / SPECS[precision].quantized_max, _SMALLEST_SCALE)
    result: NDArray[Any] = scales.astype(np.float16).astype(np.float32)
    return result


def quantize_graph(
    model: ir.Model,
    precision: Precision,
    ranges: Mapping[str, tuple[float, float]] | None,
    *,
    zero_points: bool = False,
    rounded: Mapping[str, NDArray[Any]] | None = None,
    float32: Collection[str] = (),
    dynamic: Collection[str] = (),
) -> ir.Model:
    """Return a new float32 graph with quantised projections.

    precision: one of `QUANTIZED`.
    ranges: name of an activation → its smallest and its largest value that do not saturate (`calibration.ranges_of`);
    None writes the dynamic form.
    zero_points: True to give activations with one-sided ranges zero points, for int8 only; False for zero points of 0,
    which TensorRT requires.
    rounded: name of a weight → its integers (out, in), with the scales `weight_scales`. Other weights are rounded to
    nearest.
    float32: the names of projections that are not quantised, as in `projections_named`.
    dynamic: the names of projections in the dynamic form.
    Errors: ExportError when ``ranges`` has no range for an activation, or a range that is empty or not finite; or
    without ranges, when all projections are convolutions.
    """
    out = model.clone()
    pairs = _Pairs(out.graph, precision, zero_points=zero_points, rounded=rounded or {})
    projections = {str(node.name): node for node in projections_of(out.graph)}
    for name in projections_named(out.graph, float32):
        del projections[name]
    while_running = set(dynamic)
    if ranges is None:
        projections = {name: projections[name] for name in can_be_dynamic(projections.values())}
        while_running = set(projections)
        if not projections:
            raise ExportError(
                f"{precision} without calibration images quantises no convolutions, and this network has no other "
                "projection",
                hint="add --calibration and a folder or an .npz of images",
            )
    if not while_running.isdisjoint(projections):
        out.metadata_props[DYNAMIC] = str(DYNAMIC_COLUMNS)
    for name, node in projections.items():
        if ranges is not None and name not in while_running:
            low, high = ranges.get(str(input_of(node, 0).name), (0.0, 0.0))
            if not (np.isfinite([low, high]).all() and low <= 0 <= high and low < high):
                raise ExportError(
                    f"{name}: expected a calibrated range around 0 for the input of this node, got {low} to {high}"
                )
            pairs.quantize_activation(node, low, high)
        pairs.quantize_weight(node)
    remove_unused(out)
    return out


class _Pairs:
    """Puts Q/DQ pairs before the projections of a graph."""

    def __init__(
        self, graph: ir.Graph, precision: Precision, *, zero_points: bool, rounded: Mapping[str, NDArray[Any]]
    ) -> None:
        spec = SPECS[precision]
        if spec.quantized is None:
            raise ValueError(f"{precision} is not quantised")
        self._graph, self._precision, self._zero_points, self._rounded = graph, precision, zero_points, rounded
        self._type, self._largest = numpy_type(spec.quantized), spec.quantized_max
        self._made: dict[ir.Value, ir.Value] = {}

    def quantize_activation(self, projection: ir.Node, low: float, high: float) -> None:
        """Put DQ(Q(x)) before a projection, for it alone, so that an engine fuses both."""
        import onnx_ir as ir

        stem, x = f"{projection.name}.input", input_of(projection, 0)
        if self._zero_points and high - low < _MAX_USED * 2 * max(-low, high):
            step = np.maximum(np.float32((high - low) / _STEPS), np.float32(_SMALLEST_SCALE))
            zero_point = np.rint(-low / step).astype(np.uint8)
        else:
            step = _scales(np.asarray(max(-low, high)), self._precision)
            zero_point = np.zeros((), self._type)
        scale = add_constant(self._graph, f"{stem}.scale", np.asarray(step))
        zero = add_constant(self._graph, f"{stem}.zero", zero_point)
        quantized = ir.Value(name=f"{stem}.quantized", shape=x.shape, type=zero.type)
        near = ir.Value(name=stem, shape=x.shape, type=x.type)
        for operator, read, output in (("QuantizeLinear", x, quantized), ("DequantizeLinear", quantized, near)):
            name = f"{projection.name}/{operator}"
            projection.prepend(declare(ir.node(operator, [read, scale, zero], outputs=[output], name=name), "quantize"))
        projection.replace_input_with(0, near)

    def quantize_weight(self, projection: ir.Node) -> None:
        """Put the quantised weight and its DQ node, which all projections of this weight share, before a projection."""
        import onnx_ir as ir

        weight, axis = input_of(projection, 1), output_axis(projection)
        if weight not in self._made:
            name, values = str(weight.name), stored(weight)
            matrix = weight_matrix(projection, values)
            scales = weight_scales(matrix, self._precision)
            if name in self._rounded:
                quantized = self._rounded[name].astype(self._type)
            else:
                scaled = np.clip(matrix / scales[:, None], -self._largest, self._largest)
                quantized = (np.rint(scaled) if self._type.kind == "i" else scaled).astype(self._type)
            inputs = [
                add_constant(self._graph, f"{name}.{part}", array)
                for part, array in (
                    ("quantized", quantized.reshape(values.shape) if axis == 0 else np.ascontiguousarray(quantized.T)),
                    ("scale", scales),
                    ("zero", np.zeros(scales.shape, self._type)),
                )
            ]
            self._made[weight] = ir.Value(name=f"{name}.dequantized", shape=weight.shape, type=weight.type)
            node = ir.node(
                "DequantizeLinear",
                inputs,
                {"axis": axis},
                outputs=[self._made[weight]],
                name=f"{name}/DequantizeLinear",
            )
            projection.prepend(declare(node, "quantize"))
        projection.replace_input_with(1, self._made[weight])
