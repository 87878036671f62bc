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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.errors import ExportError
from gmmvit_deploy.graphs.declared import declare
from gmmvit_deploy.graphs.roles import roles_of
from gmmvit_deploy.graphs.wiring import Wiring, attribute_of, copy_of, rewrite_graph
from gmmvit_deploy.inference.precision import SPECS, Precision

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto


DYNAMIC = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
"""The key in the metadata of a graph in the dynamic form, which holds `DYNAMIC_COLUMNS`.  It is OpenVINO's property."""
DYNAMIC_COLUMNS = 64
"""Measured with DINOv2 ViT-S/14, 32 to 384: each doubling loses 0.1 dB, and 64 and 128 are the fastest."""
_STEPS = 255  # of an activation with a zero point
_MAX_USED = 0.75
"""An activation gets a zero point if its range is a smaller part of the symmetric range, as after GELU."""
_PART = re.compile(r"\.parts\.\d+(?=/)")
_SMALLEST_SCALE = 2.0**-24  # the smallest positive float16; scales are stored as float16


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The values of a quantised data type.

    name: ``int8`` or ``fp8``.  largest: the largest value of the data type that the quantisation uses.
    """

    name: Precision
    largest: float

    @property
    def numpy_type(self) -> Any:
        import ml_dtypes

        return np.int8 if self.name == "int8" else ml_dtypes.float8_e4m3fn

    def quantized(self, values: NDArray[Any], scale: NDArray[Any]) -> NDArray[Any]:
        """Return ``values`` divided by ``scale``, rounded to the quantised data type, in which others saturate."""
        scaled = np.clip(values / scale, -self.largest, self.largest)
        result: NDArray[Any] = (np.rint(scaled) if self.name == "int8" else scaled).astype(self.numpy_type)
        return result

    def scale(self, largest: NDArray[Any]) -> NDArray[Any]:
        """Return the scale at which the magnitude ``largest`` becomes the largest quantised value, as float16."""
        scales = np.maximum(np.asarray(largest, np.float64) / self.largest, _SMALLEST_SCALE)
        result: NDArray[Any] = scales.astype(np.float16).astype(np.float32)
        return result


def grid_of(precision: Precision) -> Grid:
    """Return the grid of a precision: integers from −127 to 127 for int8, E4M3 values from −448 to 448 for fp8."""
    largest = SPECS[precision].quantized_max
    if largest is None:
        raise ValueError(f"{precision} is not quantised")
    return Grid(name=precision, largest=largest)


def activations_of(graph: GraphProto) -> tuple[str, ...]:
    """Return the names of the tensors that projections read as activations, each once, in the order of the graph."""
    return tuple(dict.fromkeys(node.input[0] for node in projections_of(graph)))


def projections_of(graph: GraphProto) -> list[NodeProto]:
    """Return the nodes that are quantised, in the order of the graph."""
    roles = roles_of(graph)
    return [node for node in graph.node if roles[node.name] == "projection"]


def projections_named(graph: GraphProto, names: Collection[str]) -> set[str]:
    """Return the names of the projections that the graph for CPUs calls ``names``.

    In a graph for GPUs, a projection to queries, keys and values can be separate projections: its parts.
    """
    return {node.name for node in projections_of(graph) if _PART.sub("", node.name) in names}


def can_be_dynamic(projections: Iterable[NodeProto]) -> list[str]:
    """Return the names of the projections whose input OpenVINO quantises while it runs: all but convolutions."""
    return [node.name for node in projections if node.op_type != "Conv"]


def output_axis(projection: NodeProto) -> int:
    """Return 0 or 1, the index of the weight's dimension that holds the output channels."""
    if projection.op_type == "Conv":
        return 0
    return 0 if attribute_of(projection, "transB", 0) else 1


def weight_matrix(projection: NodeProto, weight: NDArray[Any]) -> NDArray[Any]:
    """Return the weight of a projection as a matrix (out, in)."""
    return weight.reshape(len(weight), -1) if output_axis(projection) == 0 else weight.T


def weight_scales(matrix: NDArray[Any], precision: Precision) -> NDArray[Any]:
    """Return the scale of each row of a weight (out, in)."""
    return grid_of(precision).scale(np.abs(matrix).max(axis=1))


def quantize_graph(
    proto: ModelProto,
    precision: Precision,
    ranges: Mapping[str, tuple[float, float]] | None,
    *,
    zero_points: bool = False,
    rounded: Mapping[str, NDArray[Any]] | None = None,
    float32: Collection[str] = (),
    dynamic: Collection[str] = (),
) -> ModelProto:
    """Return a new float32 graph with quantised projections.

    precision: ``int8`` or ``fp8``.
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
    out = copy_of(proto)
    wiring = Wiring(out.graph)
    pairs = _Pairs(grid_of(precision), zero_points=zero_points, rounded=rounded or {})
    projections = {node.name for node in projections_of(out.graph)} - projections_named(out.graph, float32)
    while_running = set(dynamic)
    if ranges is None:
        projections = while_running = set(can_be_dynamic(projections_of(out.graph)))
        if not projections:
            raise ExportError(
                "int8 without calibration images quantises no convolutions, and this network has no other projection",
                hint="add --calibration and a folder or an .npz of images",
            )
    if while_running & projections:
        out.metadata_props.add(key=DYNAMIC, value=str(DYNAMIC_COLUMNS))
    for node in out.graph.node:
        if node.name in projections:
            activation, weight = node.input[0], node.input[1]
            if ranges is not None and node.name not in while_running:
                low, high = ranges.get(activation, (0.0, 0.0))
                if not (np.isfinite([low, high]).all() and low <= 0 <= high and low < high):
                    raise ExportError(
                        f"{node.name}: expected a calibrated range around 0 for the input of this node, "
                        f"got {low} to {high}"
                    )
                node.input[0] = pairs.activation(node.name, activation, low, high)
            node.input[1] = pairs.weight(node, wiring.stored(weight))
        pairs.nodes.append(node)
    rewrite_graph(out.graph, pairs.nodes, [*out.graph.initializer, *pairs.constants])
    return out


class _Pairs:
    """Makes Q/DQ pairs, and adds them to the nodes and constants of the quantised graph."""

    def __init__(self, grid: Grid, *, zero_points: bool, rounded: Mapping[str, NDArray[Any]]) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []
        self._grid, self._zero_points, self._rounded = grid, zero_points, rounded
        self._made: dict[str, str] = {}

    def activation(self, reader: str, name: str, low: float, high: float) -> str:
        """Make DQ(Q(x)) for a projection alone, so that an engine fuses both; return the name of its output."""
        from onnx import helper

        stem = f"{reader}.input"
        if self._zero_points and high - low < _MAX_USED * 2 * max(-low, high):
            step = np.maximum(np.float32((high - low) / _STEPS), np.float32(_SMALLEST_SCALE))
            zero_point = np.rint(-low / step).astype(np.uint8)
        else:
            step = self._grid.scale(np.asarray(max(-low, high)))
            zero_point = np.zeros((), self._grid.numpy_type)
        scale, zero = self._constant(f"{stem}.scale", np.asarray(step)), self._constant(f"{stem}.zero", zero_point)
        for operator, read, output in (
            ("QuantizeLinear", name, f"{stem}.quantized"),
            ("DequantizeLinear", f"{stem}.quantized", stem),
        ):
            node = helper.make_node(operator, [read, scale, zero], [output], name=f"{reader}/{operator}")
            self.nodes.append(declare(node, "quantize"))
        return stem

    def weight(self, projection: NodeProto, values: NDArray[Any]) -> str:
        """Make the quantised weight and its DQ node, which all its projections share; return the name of the output."""
        from onnx import helper

        name, axis = projection.input[1], output_axis(projection)
        if name not in self._made:
            matrix = weight_matrix(projection, values)
            scales = weight_scales(matrix, self._grid.name)
            if name in self._rounded:
                quantized = self._rounded[name].astype(self._grid.numpy_type)
            else:
                quantized = self._grid.quantized(matrix, scales[:, None])
            stored = quantized.reshape(values.shape) if axis == 0 else np.ascontiguousarray(quantized.T)
            inputs = [
                self._constant(f"{name}.quantized", stored),
                self._constant(f"{name}.scale", scales),
                self._constant(f"{name}.zero", np.zeros(scales.shape, self._grid.numpy_type)),
            ]
            self._made[name] = f"{name}.dequantized"
            node = helper.make_node(
                "DequantizeLinear", inputs, [self._made[name]], name=f"{name}/DequantizeLinear", axis=axis
            )
            self.nodes.append(declare(node, "quantize"))
        return self._made[name]

    def _constant(self, name: str, values: NDArray[Any]) -> str:
        from onnx import numpy_helper

        self.constants.append(numpy_helper.from_array(values, name))
        return name
