"""Spare commands the time in which Python's garbage collector looks for cycles.

PyTorch and its exporter create millions of objects that live until the process ends. The collector reads them again
and again, and frees next to nothing: in an export of a ViT, it takes more than a quarter of the process's time.
"""

from __future__ import annotations

import gc

__all__ = ["collect_rarely"]

_THRESHOLDS = (100_000, 50, 100)
"""Containers, and collections of the younger generation, between two collections; Python 3.11's own: 700, 10, 10."""


def collect_rarely() -> None:
    """Let the collector run rarely, in a command that ends after its work.

    Not for a service: a cycle may hold the body of a request, and would hold it for thousands of requests.
    """
    gc.set_threshold(*_THRESHOLDS)
