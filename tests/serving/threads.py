"""Work in threads beside a test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def in_threads(work: Callable[[threading.Event], None], count: int) -> Iterator[None]:
    """Run ``work`` in several threads; at the end of the block set the event that it gets, and raise its errors."""
    ended = threading.Event()
    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(work, ended) for _ in range(count)]
        try:
            yield
        finally:
            ended.set()
    for future in running:
        future.result()
