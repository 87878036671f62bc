"""A queue of samples, and worker threads that answer them in batches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Workers"]


class Workers:
    """Worker threads with a common queue of samples.

    ``callers`` is the number of threads. An idle thread takes up to ``most`` of the samples in the queue, and answers
    these samples in a single call. As in a server with a queue delay of 0, no sample waits until a batch is full.
    """

    def __init__(self, answer: Callable[[Sequence[Any]], None], *, most: int, callers: int) -> None:
        self._answer = answer
        self._most = most
        self._waiting: deque[Any] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(callers)]
        for thread in self._threads:
            thread.start()

    def put(self, samples: Sequence[Any]) -> None:
        """Append samples to the queue, and return at once."""
        with self._changed:
            self._waiting.extend(samples)
            self._changed.notify(len(samples))

    def close(self) -> None:
        """Wait until every sample is answered, then end the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                taken = [self._waiting.popleft() for _ in range(min(self._most, len(self._waiting)))]
            self._answer(taken)
