"""Estimate the roofline: the minimum time of a model on this machine, from rates measured on this machine.

    minimum time = max(operations / rate of matrix products, bytes / bandwidth)
    share of the roofline = minimum time / measured time

operations: the matrix products and convolutions of the exported graph; a multiplication with its addition counts as 2.
rate: the highest operations per second of any installed library in the same precision, on any matrix product with a
shape of the model. The rate is measured before and after the runners, because a machine may be slower for a while.
bytes: the sizes of the weights, the input and the logits. All other data is assumed to stay in caches.
bandwidth: the bytes that a copy reads and writes per second.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gmmvit_deploy.bench._products import ProductRate, Shape, bandwidth, libraries, rate
from gmmvit_deploy.inference.precision import SPECS, Precision
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.runtimes.runners.runner import Device

if TYPE_CHECKING:
    from onnx import ModelProto

    from gmmvit_deploy.bundle.artifacts import Bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkWork:
    """The work of a network for a batch.

    products: shape (rows, inner, columns) of a matrix product with a weight → their number.
    weight_values: the number of weights.  input_bytes, output_bytes: of the input and of the logits.
    """

    batch: int
    operations: int
    products: dict[Shape, int]
    weight_values: int
    input_bytes: int
    output_bytes: int

    def min_bytes(self, precision: Precision) -> int:
        return self.weight_values * SPECS[precision].weight_bytes + self.input_bytes + self.output_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The measured rates of this machine in a precision.

    bandwidth: bytes a second.  absent: the libraries that are missing, or do not multiply in this precision.
    """

    precision: Precision
    device: Device
    rates: tuple[ProductRate, ...]
    bandwidth: float
    absent: tuple[str, ...]

    @property
    def best(self) -> ProductRate:
        return max(self.rates, key=lambda product: product.gflops)

    def min_ms(self, work: NetworkWork) -> float:
        computing = work.operations / (self.best.gflops * 1e9)
        return 1e3 * max(computing, work.min_bytes(self.precision) / self.bandwidth)


def network_work(bundle: Bundle, batch: int) -> NetworkWork:
    """Count the work of a batch in the bundle's ``model.onnx``."""
    import onnx

    return work_of_graph(onnx.load(bundle.onnx_path, load_external_data=False), batch)


def work_of_graph(proto: ModelProto, batch: int) -> NetworkWork:
    """Count the work of a batch in a float32 export.  Errors: ValueError when a shape cannot be inferred."""
    from onnx import helper, numpy_helper

    proto = copy.deepcopy(proto)  # its batch size becomes ``batch``
    entry = proto.graph.input[0]
    entry.type.tensor_type.shape.dim[0].dim_value = batch
    shapes = _shapes(proto)
    weights = {tensor.name: tuple(tensor.dims) for tensor in proto.graph.initializer}
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
            raise ValueError(f"{node.name}: the shapes of this node cannot be inferred")
        # Each output value of a convolution is a sum over the window of the filter and over the channels of a group.
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


def measured_roofline(
    works: Sequence[NetworkWork], precision: Precision, device: Device = "cpu", *, seen: Roofline | None = None
) -> Roofline | None:
    """Measure the rate of each library on each matrix product; None if none multiplies in this precision.

    seen: an earlier measurement, whose rates count where they are higher.
    """
    makers = libraries(precision, device)
    rates = {(product.library, product.shape): product for product in (seen.rates if seen else ())}
    absent = set()
    for shape in dict.fromkeys(shape for work in works for shape in work.products):
        for library, make in makers.items():
            try:
                program = make(shape)
            except Exception:  # the library is missing, or does not compute this matrix product on this machine
                absent.add(library)
                continue
            measured = ProductRate(library=library, shape=shape, gflops=rate(program, shape, device))
            earlier = rates.get((library, shape), measured)
            rates[library, shape] = max(earlier, measured, key=lambda product: product.gflops)
    if not rates:
        return None
    return Roofline(
        precision=precision,
        device=device,
        rates=tuple(rates.values()),
        bandwidth=max(bandwidth(device), seen.bandwidth if seen else 0.0),
        absent=tuple(sorted(absent)),
    )


def measured_rooflines(
    works: Sequence[NetworkWork],
    targets: Iterable[tuple[Precision, Device]],
    *,
    seen: Mapping[tuple[Precision, Device], Roofline] | None = None,
    on_progress: OnProgress = ignore,
) -> dict[tuple[Precision, Device], Roofline]:
    """Return (precision, device) → `measured_roofline`, for the targets that have one.  seen: earlier ones."""
    rooflines = {}
    for precision, device in targets:
        on_progress(Progress(f"roofline of the {device} in {precision}"))
        before = seen.get((precision, device)) if seen else None
        line = measured_roofline(works, precision, device, seen=before)
        if line is not None:
            rooflines[precision, device] = line
    return rooflines


def _shapes(proto: ModelProto) -> dict[str, tuple[int, ...]]:
    import onnx

    inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True).graph
    return {
        value.name: tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
        for value in (*inferred.value_info, *inferred.input, *inferred.output)
        if all(dim.HasField("dim_value") for dim in value.type.tensor_type.shape.dim)
    }
