"""Decode large images in processes of their own, so that requests with small images do not wait for the large images.

Triton calls the preprocessing model again only after a call returns, so a call that decodes large images would make
every other request wait. The model therefore hands the images of a large request to `LargeImages`, returns, and answers
the request later.

    request → steps of a few images each → the threads take a step of each waiting request in turn → Decoder

The turns keep a request with a single photograph from waiting for all images of the request before it. Each thread
passes its images to a `Decoder`, a process of low priority: small images and the network get the processor first. A
thread of low priority in the model's own process would not do, because it keeps the interpreter lock, and the lock on
the memory map, while other programs use the processor. A thread takes the decoder that was used last, and one that
nobody needs for a while ends.

``python -m`` runs this module as the process of a `Decoder`, with the arguments of ``pixels_from_bytes`` in JSON.
"""

import contextlib
import ctypes
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .preprocess import UnusableImage, pixels_from_bytes

NICENESS = 10
"""Linux's niceness of a decoder, from 0 (as the server) to 19 (only otherwise idle processors)."""
_IDLE_S = 30.0
"""A decoder that had no image for this time ends."""
_LENGTH = struct.Struct("<I")
_PIXELS, _REASON = b"p", b"r"


class Job:
    """The images of a request.

    steps: functions of a `Decoder` that decode a part of the images, run in any order and at the same time, and raise
    nothing.  pixels: the number of all images.  finish: called after the last step; answers the request.
    """

    def __init__(self, steps: Iterable[Callable[[Any], None]], *, pixels: int, finish: Callable[[], None]) -> None:
        self.steps = deque(steps)
        self.pixels = pixels
        self.finish = finish
        self.unfinished = len(self.steps)


class LargeImages:
    """Threads that run the steps of jobs, a step of each waiting job in turn."""

    def __init__(self, *, threads: int, max_pixels: int, target: Mapping[str, Any] | None = None) -> None:
        """max_pixels: of all jobs that wait or run, which bounds their memory and waits.  target: see `Decoder`."""
        self.max_pixels = max_pixels
        self.pixels = 0
        self._target = dict(target or {})
        self._waiting: deque[Job] = deque()
        self._decoders: deque[tuple[float, Decoder]] = deque()
        """(when it was used, decoder) of those that no thread uses, the last one used at the end."""
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def has_room(self, pixels: int) -> bool:
        """Return whether a job with this number of pixels may be added.  Only `add` takes room."""
        return not self._closed and self.pixels + pixels <= self.max_pixels

    def add(self, job: Job) -> None:
        """Add a job for which there is room."""
        with self._changed:
            self.pixels += job.pixels
            self._waiting.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Complete the jobs, and end the threads and their decoders."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._end_decoders(idle_s=0)

    def _work(self) -> None:
        while (taken := self._next_step()) is not None:
            job, step = taken
            with self._changed:
                decoder = self._decoders.pop()[1] if self._decoders else Decoder(self._target)
            # Whatever happens, the thread lives and the room is given back: without them, no large image is answered
            # any more, while the server is ready.
            with _logged_errors():  # `finish` refuses images without pixels
                step(decoder)
            with self._changed:
                self._decoders.append((time.monotonic(), decoder))
                job.unfinished -= 1
                last = job.unfinished == 0
            if last:
                with _logged_errors():
                    job.finish()
                with self._changed:
                    self.pixels -= job.pixels

    def _next_step(self) -> tuple[Job, Callable[[Any], None]] | None:
        """Wait for a step; return None when no step is left after `close`."""
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._end_decoders(idle_s=_IDLE_S)
                self._changed.wait(_IDLE_S)
            job = self._waiting.popleft()
            step = job.steps.popleft()
            if job.steps:
                self._waiting.append(job)
                self._changed.notify()
            return job, step

    def _end_decoders(self, *, idle_s: float) -> None:
        while self._decoders and time.monotonic() - self._decoders[0][0] >= idle_s:
            self._decoders.popleft()[1].close()


@contextlib.contextmanager
def _logged_errors() -> Iterator[None]:
    try:
        yield
    except Exception:
        traceback.print_exc()


class Decoder:
    """A process that decodes images, which the first image starts.  target: the arguments of ``pixels_from_bytes``."""

    def __init__(self, target: Mapping[str, Any]) -> None:
        self._target = json.dumps(dict(target))
        self._process: subprocess.Popen[bytes] | None = None

    def pixels(self, data: bytes) -> bytes | str:
        """Return the pixels of an encoded image as bytes, or the reason why the image cannot be used."""
        try:
            kind, content = self._asked(data)
        except (OSError, EOFError):
            self.close()
            return "the process that decodes large images ended while it decoded this image"
        return content if kind == _PIXELS else content.decode(errors="replace")

    def _asked(self, data: bytes) -> tuple[bytes, bytes]:
        if self._process is None:
            package = Path(__file__).parent  # in a server, it has another name than here
            self._process = subprocess.Popen(
                [_python(), "-m", f"{package.name}.{Path(__file__).stem}", self._target],
                cwd=package.parent,  # where Python finds the package; with PYTHONSAFEPATH, PYTHONPATH must name it
                env={**os.environ, "PYTHONPATH": f"{package.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        sent, received = self._process.stdin, self._process.stdout
        if sent is None or received is None:
            raise EOFError
        _write(sent, data)
        return _read(received, 1), _read_sized(received)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if stream is not None:
                        stream.close()
            process.kill()
            process.wait()


def _python() -> str:
    """Return the Python of the server.  In Triton's stub, which embeds Python, `sys.executable` can be another file."""
    return shutil.which("python3") or sys.executable


def _write(stream: Any, data: bytes) -> None:
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def _read(stream: Any, count: int) -> bytes:
    data: bytes = stream.read(count)
    if len(data) < count:
        raise EOFError
    return data


def _read_sized(stream: Any) -> bytes:
    return _read(stream, _LENGTH.unpack(_read(stream, _LENGTH.size))[0])


def return_memory() -> None:
    """Return freed memory to the operating system: glibc keeps the blocks of large images for later otherwise."""
    with contextlib.suppress(OSError, AttributeError):  # another C library has no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def main() -> None:
    with contextlib.suppress(OSError):  # a container may forbid the system call; the decoder then runs as the others
        os.nice(NICENESS)
    target = json.loads(sys.argv[1])
    with contextlib.suppress(EOFError, BrokenPipeError):  # the model ended
        while True:
            data = _read_sized(sys.stdin.buffer)
            try:
                kind, content = _PIXELS, pixels_from_bytes(data, **target).tobytes()
            except UnusableImage as exc:
                kind, content = _REASON, str(exc).encode()
            sys.stdout.buffer.write(kind)
            _write(sys.stdout.buffer, content)
            return_memory()


if __name__ == "__main__":
    main()
