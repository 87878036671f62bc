"""Measure the parts of a `CoreModel` for a graph in a runtime on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.bench.core_model import CoreModel, bandwidths
from gmmvit_deploy.bench.core_to_core import round_trip_ns
from gmmvit_deploy.bench.products import product_on_one_core, rate
from gmmvit_deploy.bench.roofline import NetworkWork

__all__ = ["measured_parts", "ms_of"]

_SECONDS = 0.4
_ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "fp8": 1}


def measured_parts(
    run: Callable[[NDArray[Any]], object],
    work: NetworkWork,
    images: NDArray[Any],
    *,
    precision: str = "fp32",
) -> CoreModel | None:
    """Measure a network on one core, and the distance and the bandwidth of two.

    run: computes a batch on a single thread.  work: the work of a single image.
    images: as many images as a core computes at once.
    Returns None on a machine with a single core, or without a C compiler: the distance is then unknown.
    """
    apart = round_trip_ns()
    if apart is None:
        return None
    single, both = bandwidths()
    image_ms = ms_of(lambda: run(images[:1]))
    # The products' rate of the runtime with float32 weights. A runtime with another arithmetic spends a smaller part of
    # its time in products, which this rate cannot show: the part is then at most the whole time.
    seconds = flops = 0.0
    for shape, count in work.products.items():
        operations = 2 * float(np.prod(shape)) * count
        seconds += operations / (rate(product_on_one_core(shape), shape, "cpu") * 1e9)
        flops += operations
    products_ms = 1e3 * seconds * work.operations / flops
    return CoreModel(
        image_ms=image_ms,
        products_ms=min(image_ms, products_ms),
        chunk_image_ms=ms_of(lambda: run(images)) / len(images),
        chunk=len(images),
        operators=work.multiplications,
        round_trip_ns=apart,
        weight_bytes=work.weight_values * _ELEMENT_BYTES[precision],
        bandwidth=single,
        bandwidth_of_two=both,
    )


def ms_of(call: Callable[[], object]) -> float:
    """Return the median time of a call in milliseconds."""
    for _ in range(3):
        call()
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e3
