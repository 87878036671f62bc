"""The precisions: one record holds all that differs between them.

A new precision is a name in `Precision` and a record in `SPECS`; CONTRIBUTING.md lists what else it needs.
The data type of an operator follows from its role (what the operator is for: `graphs/roles.py`) and from the record;
`graphs/cast.py` applies it, and docs/pages/precisions.md shows it. Masks are folded (computed once and stored as
constants) in float32 before the cast, because small entries of the base matrix, from which a mask is computed, would
become zero in half precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Mapping


Precision = Literal["fp32", "fp16", "bf16", "int8", "fp8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
ElementType = Literal["float32", "float16", "bfloat16"]
QuantizedType = Literal["int8", "float8_e4m3fn"]
"""Names of numpy and ml_dtypes."""
Arithmetic = Literal["f32", "bf16"]
"""Data type in which OpenVINO, and this project's CPU kernels, compute: the names are OpenVINO's."""
Form = Literal["", "static", "mixed", "dynamic", "merged"]
"""The form of a graph for CPUs says how its activations are quantised (`RunnerName`); "" for another graph.

``merged`` is the static form of the network with merged tokens (`graphs.merged_tokens`).
"""
Role = Literal[
    "input",
    "embedding",
    "projection",
    "depthwise",
    "product",
    "scale",
    "mask",
    "score_bias",
    "softmax",
    "mixing",
    "norm",
    "gelu",
    "activation",
    "rotation",
    "bias",
    "residual",
    "pooling",
    "head",
    "quantize",
    "shape",
    "unknown",
]
"""Role of an operator of the network; graphs/roles.py explains each role."""
ROLES: tuple[Role, ...] = get_args(Role)
FLOAT32_ROLES: frozenset[Role] = frozenset({"input", "softmax", "norm", "pooling", "head", "unknown"})
"""Operators of these roles compute in float32 in every precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSpec:
    """What a precision is, what it must reach, and who computes in it.

    element: the floating-point data type of the operators outside `FLOAT32_ROLES`.
    weight_bytes: the size of a weight of a projection.
    quantized: the data type to which the weights of projections are quantised; None for a precision without
    quantisation. The matrix products of attention are never quantised, because Q/DQ pairs in attention prevent TensorRT
    from using its fused attention kernel.
    quantized_max: the largest value of ``quantized`` that is used.
    calibrated: True if the activations that projections read are quantised as well: to ranges that images set, or, in
    the form ``dynamic``, while the network runs.
    forms: of the graphs for CPUs; () if a CPU runs the same graph as a GPU. Unless the user names a form, CPUs run the
    first that a bundle has. The form ``dynamic`` needs no images.
    unit_roundoff: of ``element``; None for a quantised precision, whose error depends on the data.
    accuracy_gate: the share of PyTorch's top-1 to reach; as in MLPerf.
    kept_gate: the share of PyTorch's decisions to keep; 1 for all that the limit of the logits decides.
    onnxruntime: True if ONNX Runtime runs the graph on a CPU.
    openvino_name: the name of the precision among OpenVINO's capabilities; "" if OpenVINO does not run it on a CPU.
    openvino: the data type in which OpenVINO computes all that the graph does not quantise.
    openvino_graph: the precision of the graph that OpenVINO loads, if it is not this one. OpenVINO then chooses where
    to round; the roundings of this precision's graph do not apply.
    attention: the data type in which this project's CPU kernels compute the products of attention, if the CPU has it,
    otherwise float32.
    compute_capability: the lowest of a GPU on which TensorRT computes in this precision.
    tensorrt_mode: the ``precision_mode`` of ONNX Runtime's TensorRT accelerator in Triton.
    """

    element: ElementType
    weight_bytes: int
    quantized: QuantizedType | None = None
    quantized_max: float = 0.0
    calibrated: bool = False
    forms: tuple[Form, ...] = ()
    unit_roundoff: float | None = None
    accuracy_gate: float
    kept_gate: float = 1.0
    onnxruntime: bool
    openvino_name: str = ""
    openvino: Arithmetic = "f32"
    openvino_graph: Precision | None = None
    attention: Arithmetic = "f32"
    compute_capability: float
    tensorrt_mode: str

    @property
    def projection(self) -> ElementType | QuantizedType:
        """The data type of the numbers that projections multiply."""
        return self.quantized if self.quantized and self.calibrated else self.element


SPECS: Mapping[Precision, PrecisionSpec] = {
    "fp32": PrecisionSpec(
        element="float32",
        weight_bytes=4,
        unit_roundoff=2.0**-24,
        accuracy_gate=0.999,
        onnxruntime=True,
        openvino_name="FP32",
        compute_capability=7.5,
        tensorrt_mode="FP32",
    ),
    "fp16": PrecisionSpec(
        element="float16",
        weight_bytes=2,
        unit_roundoff=2.0**-11,
        accuracy_gate=0.999,
        onnxruntime=True,
        compute_capability=7.5,
        tensorrt_mode="FP16",
    ),
    "bf16": PrecisionSpec(
        element="bfloat16",
        weight_bytes=2,
        unit_roundoff=2.0**-8,
        accuracy_gate=0.999,
        onnxruntime=False,  # on a CPU, it has no matrix product in bfloat16
        openvino_name="BF16",
        openvino="bf16",
        openvino_graph="fp32",
        attention="bf16",
        compute_capability=8.0,
        tensorrt_mode="FP16",
    ),
    "int8": PrecisionSpec(
        element="float16",
        weight_bytes=1,
        quantized="int8",
        quantized_max=127.0,
        calibrated=True,
        forms=("static", "mixed", "dynamic", "merged"),
        accuracy_gate=0.99,
        kept_gate=0.97,
        onnxruntime=True,
        openvino_name="INT8",
        attention="bf16",
        compute_capability=7.5,
        tensorrt_mode="INT8",
    ),
    "fp8": PrecisionSpec(
        element="float16",
        weight_bytes=1,
        quantized="float8_e4m3fn",
        quantized_max=448.0,
        calibrated=True,
        accuracy_gate=0.99,
        kept_gate=0.97,
        onnxruntime=False,  # on a CPU, it does not quantise to float8
        compute_capability=8.9,
        tensorrt_mode="FP16",
    ),
}
QUANTIZED = tuple(name for name, spec in SPECS.items() if spec.quantized)
CALIBRATED = tuple(name for name, spec in SPECS.items() if spec.calibrated)
ONNXRUNTIME_PRECISIONS = tuple(name for name, spec in SPECS.items() if spec.onnxruntime)
OPENVINO_PRECISIONS = tuple(name for name, spec in SPECS.items() if spec.openvino_name)


def element_type(role: Role, precision: Precision) -> ElementType:
    """Return the floating-point data type in which an operator of this role computes."""
    return "float32" if role in FLOAT32_ROLES else SPECS[precision].element


def graph_precision(precision: Precision) -> Precision:
    """Return the precision of the graph that OpenVINO loads to compute in ``precision``."""
    return SPECS[precision].openvino_graph or precision
