"""Measure how many images a core should compute at once: the chunk.

A larger chunk needs fewer calls, and a smaller chunk keeps its activations nearer to the core: which is faster depends
on the network and on the caches of the machine. A single thread computes the same images in chunks of each size, in
turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.bench.interleaved import turns

__all__ = ["CHUNKS", "best_chunk", "chunk_rates"]

CHUNKS = (1, 2, 4, 8, 16, 32)
"""The sizes to try; a runtime of ours divides a batch into chunks of powers of two."""
_ROUNDS = 5
_LEAST_ROUNDS = 2
_SECONDS = 20.0
_NEAR = 0.98
"""The usual chunk is kept if it reaches this share of the highest rate: smaller differences are noise."""

Run = Callable[[NDArray[Any]], object]


def chunk_rates(open_with: Callable[[int], Run], images: NDArray[Any]) -> dict[int, float]:
    """Return size of a chunk → images a second on one thread, for the sizes of `CHUNKS` up to the number of images.

    open_with: takes the size of a chunk, and returns a function that computes a batch on one thread in such chunks.
    images: inputs of the network. Every turn computes the same images: as many as the largest chunk that they fill.
    """
    images = images[: max(size for size in CHUNKS if size <= len(images))]
    programs = {str(size): open_with(size) for size in CHUNKS if size <= len(images)}
    seconds: dict[str, list[float]] = {size: [] for size in programs}
    least = (1 + _LEAST_ROUNDS) * len(programs)
    began = time.perf_counter()
    # The first round compiles, and fills the caches.
    for turn, (size, timed) in enumerate(turns(list(programs), _ROUNDS, np.random.default_rng(0), warm_ups=1)):
        start = time.perf_counter()
        if turn >= least and start - began > _SECONDS:
            break
        programs[size](images)
        if timed:
            seconds[size].append(time.perf_counter() - start)
    return {int(size): len(images) / float(np.median(times)) for size, times in seconds.items()}


def best_chunk(rates: Mapping[int, float], usual: int) -> int:
    """Return the size with the highest rate, or 0 if the usual size is as fast within `_NEAR`.

    If all batches are smaller than the usual size, the largest size of ``rates`` stands for it.
    """
    best = max(rates, key=lambda size: rates[size])
    return 0 if rates[min(usual, max(rates))] >= _NEAR * rates[best] else best
