"""Predict how a network runs on a number of cores, from parts that are measured on one core and between two.

    time of an image on T threads = rest + products / T + operators · (T − 1) · round trip,
                                    at least bytes / bandwidth(T)
    images a second of a large batch on n cores = n / time of an image in a chunk, at most bandwidth(n) / bytes
    bandwidth(n) = n · bandwidth(1) / (1 + contention · (n − 1)), the contention from two cores

products: the matrix products and the attention of an image, which a runtime divides among threads.
rest: everything between the products, which a runtime computes on few threads, because its operators are short.
round trip: every operator sends work to each other thread, and waits for its end.
bytes: the weights, which a core reads for each chunk.

The model is made for a machine that has more cores than the machine at hand. Its predictions for one and two cores can
be compared with measurements; all others are unchecked. It knows no second socket, no shared vector units of
hyper-threads, and no clock rate that falls with the number of busy cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

__all__ = ["CoreModel", "Division", "bandwidths", "divisions_of"]

_COPIED_BYTES = 2**26
_REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Cores divided among instances.  latency_ms: of a single image.  rate: single images a second, all together."""

    instances: int
    threads: int
    latency_ms: float
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreModel:
    """The measured parts of a network on this machine.

    image_ms: the time of a single image on one core.  products_ms: the part of it in matrix products and attention.
    chunk_image_ms: the time of an image on one core, in a chunk.  chunk: the images of a chunk.
    operators: the operators that a runtime divides among threads.  round_trip_ns: between two cores.
    weight_bytes: the bytes of the weights.
    bandwidth: bytes a second of one core.  bandwidth_of_two: of two cores together.
    """

    image_ms: float
    products_ms: float
    chunk_image_ms: float
    chunk: int
    operators: int
    round_trip_ns: float
    weight_bytes: int
    bandwidth: float
    bandwidth_of_two: float

    def __post_init__(self) -> None:
        if not 0 < self.products_ms <= self.image_ms:
            raise ValueError(f"products_ms: expected more than 0 and at most {self.image_ms}, got {self.products_ms}")

    def bandwidth_of(self, cores: int) -> float:
        """Return the bytes a second of several cores together."""
        contention = max(0.0, 2 * self.bandwidth / self.bandwidth_of_two - 1)
        return cores * self.bandwidth / (1 + contention * (cores - 1))

    def latency_ms(self, threads: int, *, beside: int = 1) -> float:
        """Return the time of a single image on several threads.

        beside: the number of instances that compute at the same time, and share the bandwidth.
        """
        rest = self.image_ms - self.products_ms
        waiting = self.operators * (threads - 1) * self.round_trip_ns / 1e6
        reading = 1e3 * self.weight_bytes * beside / self.bandwidth_of(threads * beside)
        return max(rest + self.products_ms / threads + waiting, reading)

    def batch_rate(self, cores: int) -> float:
        """Return the images a second of large batches, whose chunks each run on a core of their own."""
        reading = self.bandwidth_of(cores) * self.chunk / self.weight_bytes
        return min(cores * 1e3 / self.chunk_image_ms, reading)

    def divisions(self, cores: int) -> list[Division]:
        """Return each division of the cores among instances, from a single instance to an instance a core."""
        rows = []
        for instances in divisions_of(cores):
            threads = cores // instances
            latency = self.latency_ms(threads, beside=instances)
            rows.append(
                Division(instances=instances, threads=threads, latency_ms=latency, rate=instances * 1e3 / latency)
            )
        return rows

    def best_division(self, cores: int, *, bound_ms: float = float("inf")) -> Division:
        """Return the division with the highest rate of single images whose latency keeps the bound.

        If no latency keeps the bound, the division with the lowest latency is returned.
        """
        rows = self.divisions(cores)
        within = [row for row in rows if row.latency_ms <= bound_ms]
        return max(within, key=lambda row: row.rate) if within else min(rows, key=lambda row: row.latency_ms)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def divisions_of(cores: int) -> list[int]:
    """Return the numbers of instances to consider: powers of two up to the number of cores."""
    return [1 << power for power in range(cores.bit_length())]


def bandwidths() -> tuple[float, float]:
    """Return the bytes a second that one core, and two cores together, copy from and to memory."""
    pairs = [(np.ones(_COPIED_BYTES // 8), np.zeros(_COPIED_BYTES // 8)) for _ in range(2)]  # zeros: pages are touched
    copies: list[Callable[[], None]] = [lambda pair=pair: np.copyto(pair[1], pair[0]) for pair in pairs]  # type: ignore[misc]
    with ThreadPoolExecutor(2) as pool:

        def rate(count: int) -> float:
            times = []
            for _ in range(_REPEATS):
                start = time.perf_counter()
                list(pool.map(lambda copy: copy(), copies[:count]))
                times.append(time.perf_counter() - start)
            return 2 * count * _COPIED_BYTES / min(times)

        rate(2)  # untimed: the first copies touch the pages
        return rate(1), rate(2)
