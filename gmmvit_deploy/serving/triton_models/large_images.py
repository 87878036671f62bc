"""Decode large images in threads of their own, so that requests with small images do not wait for the large images.

``gmmvit repository`` copies this file to ``gmmvit_large_images.py`` beside the preprocessing model. Triton calls the
model again only after a call returns, so a call that decodes large images would make every other request wait. The
model therefore hands the images of a large request to `LargeImages`, returns, and answers the request later.

    request → steps of a few images each → the threads take a step of each waiting request in turn

The turns keep a request with a single photograph from waiting for all images of the request before it. The threads
have a low priority, so that small images and the network get the processor first. This file imports only the standard
library.
"""

import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable

NICENESS = 10
"""Linux's niceness of the threads, from 0 (as the server) to 19 (only otherwise idle processors)."""


class Job:
    """The images of a request.

    steps: functions that decode a part of the images. The steps run in any order and at the same time, and raise no
    exception.  pixels: the number of pixels of all images.  finish: called after the last step; answers the request.
    """

    def __init__(self, steps: Iterable[Callable[[], None]], *, pixels: int, finish: Callable[[], None]) -> None:
        self.steps = deque(steps)
        self.pixels = pixels
        self.finish = finish
        self.unfinished = len(self.steps)


class LargeImages:
    """Threads that run the steps of jobs, a step of each waiting job in turn."""

    def __init__(self, *, threads: int, most_pixels: int) -> None:
        """Start the threads.

        most_pixels: the maximum number of pixels of all jobs that wait or run. The memory and the time that a job
        waits are bounded by this number.
        """
        self.most_pixels = most_pixels
        self.pixels = 0
        self._waiting: deque[Job] = deque()
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def has_room(self, pixels: int) -> bool:
        """Return whether a job with this number of pixels may be added.  Only `add` takes room."""
        return not self._closed and self.pixels + pixels <= self.most_pixels

    def add(self, job: Job) -> None:
        """Add a job for which there is room."""
        with self._changed:
            self.pixels += job.pixels
            self._waiting.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Complete the jobs, and end the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        _lower_priority()
        while (taken := self._next_step()) is not None:
            job, step = taken
            step()
            with self._changed:
                job.unfinished -= 1
                last = job.unfinished == 0
            if last:
                job.finish()
                _return_memory()
                with self._changed:
                    self.pixels -= job.pixels

    def _next_step(self) -> tuple[Job, Callable[[], None]] | None:
        """Wait for a step; return None when no step is left after `close`."""
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait()
            job = self._waiting.popleft()
            step = job.steps.popleft()
            if job.steps:
                self._waiting.append(job)
                self._changed.notify()
            return job, step


def _lower_priority() -> None:
    with contextlib.suppress(OSError):  # a container may forbid the system call; the thread then runs as the others
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _return_memory() -> None:
    """Return freed memory to the operating system: glibc keeps the blocks of large images for later otherwise."""
    with contextlib.suppress(OSError, AttributeError):  # another C library has no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
