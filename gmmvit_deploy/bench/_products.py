"""Measure the rate of a matrix product in every installed library, on the CPU or on the GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gmmvit_deploy.extras import require
from gmmvit_deploy.inference.cores import cores
from gmmvit_deploy.inference.precision import SPECS, Precision
from gmmvit_deploy.measure.turns import seconds_of
from gmmvit_deploy.runtimes.runners.eager import limit_torch
from gmmvit_deploy.runtimes.runners.runner import Device

Shape = tuple[int, int, int]
"""The shape (rows, inner, columns) of a product (rows, inner) × (inner, columns)."""
Program = Callable[[], object]
_SECONDS_A_PRODUCT = 0.15
_COPIED_BYTES = 2**27
_AT_ONCE_ON_GPU = 20  # products between two readings of the GPU's clock: so many that no launch delays the GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRate:
    """The measured rate of a library on a matrix product, in GFLOP/s."""

    library: str
    shape: Shape
    gflops: float


def libraries(precision: Precision, device: Device) -> Mapping[str, Callable[[Shape], Program]]:
    """Return library → function that makes a program for a shape, or raises an error if the library cannot."""
    kind = SPECS[precision].projection
    return {"torch": _torch(kind, "cuda")} if device == "gpu" else _ON_CPU.get(kind, {})


def rate(program: Program, shape: Shape, device: Device) -> float:
    """Measure a program that computes a matrix product of this shape; return the median call's rate in GFLOP/s."""
    rows, inner, columns = shape
    timed = _gpu_seconds if device == "gpu" else seconds_of
    for _ in range(3):
        program()
    times: list[float] = []
    end = time.perf_counter() + _SECONDS_A_PRODUCT
    while time.perf_counter() < end or len(times) < 5:
        times.append(timed(program))
    return 2 * rows * inner * columns / float(np.median(times)) / 1e9


def bandwidth(device: Device) -> float:
    """Copy an array that is larger than the caches; return the bytes that are read and written per second."""
    import torch

    limit_torch()
    source = torch.ones(_COPIED_BYTES // 4, device="cuda" if device == "gpu" else "cpu")
    target = torch.empty_like(source)
    timed = _gpu_seconds if device == "gpu" else seconds_of
    return 2 * _COPIED_BYTES / float(np.median([timed(lambda: target.copy_(source)) for _ in range(7)]))


def _gpu_seconds(program: Program) -> float:
    """Return the mean seconds of a call, from `_AT_ONCE_ON_GPU` calls between two readings of the GPU's clock."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_AT_ONCE_ON_GPU):
        program()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / _AT_ONCE_ON_GPU


def _torch(kind: str, device: str) -> Callable[[Shape], Program]:
    def make(shape: Shape) -> Program:
        import torch

        limit_torch()
        rows, inner, columns = shape
        if kind == "int8":
            sizes = ((rows, inner), (inner, columns))
            whole = [torch.randint(-127, 127, size, dtype=torch.int8, device=device) for size in sizes]
            return _called(lambda: torch._int_mm(*whole))
        if kind == "float8_e4m3fn":
            scale = torch.ones((), device=device)
            left = torch.randn(rows, inner, device=device).to(torch.float8_e4m3fn)
            right = torch.randn(columns, inner, device=device).to(torch.float8_e4m3fn).t()
            return _called(lambda: torch._scaled_mm(left, right, scale, scale, out_dtype=torch.bfloat16))
        dtype = getattr(torch, kind)
        pair = (torch.randn(size, dtype=dtype, device=device) for size in ((rows, inner), (inner, columns)))
        first, second = pair
        out = torch.empty(rows, columns, dtype=dtype, device=device)
        return _called(lambda: torch.mm(first, second, out=out))

    return make


def _called(program: Program) -> Program:
    """Call the program once, and return the program.  Only a call shows whether the device supports the product."""
    program()
    return program


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
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return bytes(model.SerializeToString())


def _onnxruntime(shape: Shape) -> Program:
    from gmmvit_deploy.runtimes.programs.onnxruntime import session_from_onnx

    session = session_from_onnx(_product_graph(shape), "product")
    values = np.random.default_rng(1).standard_normal(shape[:2], dtype=np.float32)
    return lambda: session.run(None, {"x": values})


def _openvino(hint: str) -> Callable[[Shape], Program]:
    def make(shape: Shape) -> Program:
        openvino = require("openvino", package="openvino", extra="openvino")
        core = openvino.Core()
        settings = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": str(cores())}
        model: Any = core.read_model(_product_graph(shape))
        compiled = core.compile_model(model, "CPU", settings)
        request = compiled.create_infer_request()
        values = np.random.default_rng(1).standard_normal(shape[:2], dtype=np.float32)
        # A copy: OpenVINO does not keep an array that it shares, and would read its memory after the array is freed.
        request.set_input_tensor(openvino.Tensor(values))
        return lambda: request.infer()

    return make


_ON_CPU: Mapping[str, Mapping[str, Callable[[Shape], Program]]] = {
    "float32": {"torch": _torch("float32", "cpu"), "onnxruntime": _onnxruntime, "openvino": _openvino("f32")},
    "bfloat16": {"torch": _torch("bfloat16", "cpu"), "openvino": _openvino("bf16")},
    "int8": {"torch": _torch("int8", "cpu")},
}
