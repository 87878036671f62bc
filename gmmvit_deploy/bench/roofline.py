"""How fast could it be here?  The model's own work over the best rates that this machine was seen to reach.

    least time = max(operations / rate of matrix products, bytes / bandwidth)        share = least time / time

operations: 2 a multiply-add, of matrix products and convolutions alone, as the exported graph has them.
rate: the best that any installed library reaches on any product of the model's own shapes, in the
precision in question, in the same run.  bytes: what has to be moved even if everything else stays in
cache: weights, input and logits, each once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gmmvit_deploy.extras import require

if TYPE_CHECKING:
    from onnx import ModelProto

    from gmmvit_deploy.artifacts import Bundle

__all__ = ["NetworkWork", "ProductRate", "Roofline", "measured_roofline", "network_work", "work_of_graph"]

Shape = tuple[int, int, int]
_SECONDS_A_PRODUCT = 0.15
_COPIED_BYTES = 2**27
_ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkWork:
    """One batch.  products: (rows, inner, columns) of products with a weight → how often each is there.

    weight_values, input_bytes, output_bytes: what must be moved.
    """

    batch: int
    operations: int
    products: dict[Shape, int]
    weight_values: int
    input_bytes: int
    output_bytes: int

    def least_bytes(self, precision: str) -> int:
        return self.weight_values * _ELEMENT_BYTES[precision] + self.input_bytes + self.output_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRate:
    library: str
    shape: Shape
    gflops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """bandwidth: of copying, bytes read and written a second.  absent: libraries that were not there."""

    precision: str
    rates: tuple[ProductRate, ...]
    bandwidth: float
    absent: tuple[str, ...]

    @property
    def best(self) -> ProductRate:
        return max(self.rates, key=lambda one: one.gflops)

    def least_ms(self, work: NetworkWork) -> float:
        computing = work.operations / (self.best.gflops * 1e9)
        return 1e3 * max(computing, work.least_bytes(self.precision) / self.bandwidth)


def network_work(bundle: Bundle, batch: int) -> NetworkWork:
    """Counted in ``model.onnx``."""
    import onnx

    return work_of_graph(onnx.load(bundle.onnx_path), batch)


def work_of_graph(proto: ModelProto, batch: int) -> NetworkWork:
    """proto: of a float32 export; it is changed: its shapes are inferred for this batch."""
    from onnx import helper, numpy_helper

    entry = proto.graph.input[0]
    entry.type.tensor_type.shape.dim[0].dim_value = batch
    shapes = _shapes(proto)
    weights = {one.name: tuple(one.dims) for one in proto.graph.initializer}
    weights |= {
        node.output[0]: numpy_helper.to_array(node.attribute[0].t).shape
        for node in proto.graph.node
        if node.op_type == "Constant" and node.attribute[0].name == "value"
    }
    products: Counter[Shape] = Counter()
    operations = 0
    for node in proto.graph.node:
        if node.op_type not in ("MatMul", "Gemm", "Conv"):
            continue
        left, right, out = (shapes.get(name) or weights.get(name) for name in (*node.input[:2], node.output[0]))
        if left is None or right is None or out is None:
            raise ValueError(f"{node.name}: its shapes are not known")
        # Of a convolution every output value is a sum over the kernel's window of one group's channels.
        inner = int(np.prod(right[1:])) if node.op_type == "Conv" else left[-1]
        operations += 2 * int(np.prod(out)) * inner
        if node.op_type != "Conv" and node.input[1] in weights:
            products[int(np.prod(out[:-1])), inner, out[-1]] += 1
    element = helper.tensor_dtype_to_np_dtype(entry.type.tensor_type.elem_type).itemsize
    return NetworkWork(
        batch=batch,
        operations=operations,
        products=dict(products),
        weight_values=sum(int(np.prod(shape)) for shape in weights.values()),
        input_bytes=int(np.prod(shapes[entry.name])) * element,
        output_bytes=int(np.prod(shapes[proto.graph.output[0].name])) * 4,
    )


def measured_roofline(works: Sequence[NetworkWork], precision: str) -> Roofline | None:
    """Time each library on each product of each batch.  None for a precision that no product is known for here."""
    makers = _MAKERS.get(precision, {})
    rates, absent = [], set()
    for shape in dict.fromkeys(shape for work in works for shape in work.products):
        for library, make in makers.items():
            try:
                program = make(shape)
            except Exception:  # a library that is not there, or has no such product on this machine
                absent.add(library)
                continue
            rates.append(ProductRate(library=library, shape=shape, gflops=_rate(program, shape)))
    if not rates:
        return None
    return Roofline(precision=precision, rates=tuple(rates), bandwidth=_bandwidth(), absent=tuple(sorted(absent)))


def _shapes(proto: ModelProto) -> dict[str, tuple[int, ...]]:
    import onnx

    inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True).graph
    return {
        value.name: tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
        for value in (*inferred.value_info, *inferred.input, *inferred.output)
        if all(dim.HasField("dim_value") for dim in value.type.tensor_type.shape.dim)
    }


def _rate(program: Callable[[], object], shape: Shape) -> float:
    """Operations a second, in 1e9, of the median call."""
    for _ in range(3):
        program()
    times: list[float] = []
    end = time.perf_counter() + _SECONDS_A_PRODUCT
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        program()
        times.append(time.perf_counter() - start)
    rows, inner, columns = shape
    return 2 * rows * inner * columns / float(np.median(times)) / 1e9


def _bandwidth() -> float:
    import torch

    source = torch.ones(_COPIED_BYTES // 4)
    target = torch.empty_like(source)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return 2 * _COPIED_BYTES / float(np.median(times))


def _torch(kind: str) -> Callable[[Shape], Callable[[], object]]:
    def make(shape: Shape) -> Callable[[], object]:
        import torch

        rows, inner, columns = shape
        if kind == "int8":
            whole = [torch.randint(-127, 127, size, dtype=torch.int8) for size in ((rows, inner), (inner, columns))]
            return lambda: torch._int_mm(*whole)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[kind]
        left, right = torch.randn(rows, inner, dtype=dtype), torch.randn(inner, columns, dtype=dtype)
        out = torch.empty(rows, columns, dtype=dtype)
        return lambda: torch.mm(left, right, out=out)

    return make


def _product_graph(shape: Shape) -> bytes:
    from onnx import TensorProto, helper, numpy_helper

    rows, inner, columns = shape
    weight = np.random.default_rng(0).standard_normal((inner, columns), dtype=np.float32)
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weight"], ["y"])],
        "product",
        [value("x", TensorProto.FLOAT, [rows, inner])],
        [value("y", TensorProto.FLOAT, [rows, columns])],
        [numpy_helper.from_array(weight, "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return bytes(model.SerializeToString())


def _onnxruntime(shape: Shape) -> Callable[[], object]:
    from gmmvit_deploy.runtime.onnxruntime import session_from_bytes

    session = session_from_bytes(_product_graph(shape), "product")
    values = np.random.default_rng(1).standard_normal(shape[:2], dtype=np.float32)
    return lambda: session.run(None, {"x": values})


def _openvino(hint: str) -> Callable[[Shape], Callable[[], object]]:
    def make(shape: Shape) -> Callable[[], object]:
        openvino = require("openvino", package="openvino", extra="openvino")
        core = openvino.Core()
        model = core.read_model(_product_graph(shape))
        compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": hint})
        request = compiled.create_infer_request()
        values = np.random.default_rng(1).standard_normal(shape[:2], dtype=np.float32)
        request.set_input_tensor(openvino.Tensor(values, shared_memory=True))
        return lambda: request.infer()

    return make


_MAKERS: dict[str, dict[str, Callable[[Shape], Callable[[], object]]]] = {
    "fp32": {"torch": _torch("fp32"), "onnxruntime": _onnxruntime, "openvino": _openvino("f32")},
    "bf16": {"torch": _torch("bf16"), "openvino": _openvino("bf16")},
    "int8": {"torch": _torch("int8")},
}
