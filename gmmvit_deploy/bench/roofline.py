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

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from gmmvit_deploy.bench._products import ProductRate, Shape, bandwidth, libraries, rate
from gmmvit_deploy.graphs.wiring import input_of
from gmmvit_deploy.inference.precision import SPECS, Precision
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.runtimes.runners.runner import Device

if TYPE_CHECKING:
    import onnx_ir as ir

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
    """What this machine reaches in a precision.  best: the highest rate.  bandwidth: bytes a second."""

    precision: Precision
    device: Device
    best: ProductRate
    bandwidth: float

    def min_ms(self, work: NetworkWork) -> float:
        computing = work.operations / (self.best.gflops * 1e9)
        return 1e3 * max(computing, work.min_bytes(self.precision) / self.bandwidth)


def network_work(bundle: Bundle, batch: int) -> NetworkWork:
    """Count the work of a batch in the bundle's ``model.onnx``."""
    import onnx_ir as ir

    return work_of_graph(ir.load(bundle.onnx_path), batch)


def work_of_graph(model: ir.Model, batch: int) -> NetworkWork:
    """Count the work of a batch in a float32 export.  Errors: ValueError when a shape cannot be inferred."""
    import onnx_ir as ir
    from onnx_ir.passes.common import ShapeInferencePass

    model = model.clone()
    graph = model.graph
    entry, answer = graph.inputs[0], graph.outputs[0]
    entry.shape = ir.Shape([batch, *(entry.shape or ())[1:]])
    ShapeInferencePass(strict_mode=False)(model)
    products: Counter[Shape] = Counter()
    operations = 0
    for node in graph:
        if node.op_type not in ("MatMul", "Gemm", "Conv"):
            continue
        left, right, out = (_sizes(value) for value in (*node.inputs[:2], node.outputs[0]))
        # Each output value of a convolution is a sum over the window of the filter and over the channels of a group.
        inner = prod(right[1:]) if node.op_type == "Conv" else left[-1]
        operations += 2 * prod(out) * inner
        if node.op_type != "Conv" and input_of(node, 1).is_initializer():
            products[prod(out[:-1]), inner, out[-1]] += 1
    return NetworkWork(
        batch=batch,
        operations=operations,
        products=dict(products),
        weight_values=sum(prod(_sizes(value)) for value in graph.initializers.values()),
        input_bytes=int(prod(_sizes(entry)) * (entry.dtype or ir.DataType.FLOAT).itemsize),
        output_bytes=prod(_sizes(answer)) * 4,
    )


def _sizes(value: ir.Value | None) -> tuple[int, ...]:
    shape = value.shape if value is not None else None
    if value is None or shape is None or not shape.is_static():
        raise ValueError(f"{value}: the shape of this tensor cannot be inferred")
    return shape.numpy()


def measured_roofline(
    works: Sequence[NetworkWork], precision: Precision, device: Device = "cpu", *, seen: Roofline | None = None
) -> Roofline | None:
    """Measure the rate of each library on each matrix product; None if none multiplies in this precision.

    seen: an earlier measurement, which counts where it is higher.
    """
    makers = libraries(precision, device)
    rates = [] if seen is None else [seen.best]
    for shape in dict.fromkeys(shape for work in works for shape in work.products):
        for library, make in makers.items():
            try:
                program = make(shape)
            except Exception:  # noqa: S112 - the library is missing, or does not compute this product here
                continue
            rates.append(ProductRate(library=library, shape=shape, gflops=rate(program, shape, device)))
    if not rates:
        return None
    return Roofline(
        precision=precision,
        device=device,
        best=max(rates, key=lambda product: product.gflops),
        bandwidth=max(bandwidth(device), seen.bandwidth if seen else 0.0),
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
