"""The access log: a line of JSON for each request, without the messages that HAProxy writes to the same place.

HAProxy sends its own messages, such as "Proxy http stopped", to the log of the requests, and 2.6 cannot tell them
apart. HAProxy therefore writes to a pipe, and a thread passes lines of JSON on to the access log, and messages to the
log of the gateway. HAProxy never waits for the log: it drops lines while the pipe is full, for example on a full disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from gmmvit_deploy.errors import OutputError

_PIPE_BYTES = 1 << 20  # the maximum for users without privileges; about 2,500 lines
_READ_BYTES = 1 << 16
_PAUSE_S = 0.02
"""The time between two reads: a wake-up for many lines instead of a wake-up for each line."""


class AccessLog:
    """Writes the lines that arrive at `descriptor`, which HAProxy inherits, up to `close`."""

    def __init__(self, path: Path | None, on_message: Callable[[str], None]) -> None:
        """path: the file to which lines of JSON are appended; None means stderr.
        on_message: called with each other line, in a thread.
        Errors: OutputError when the file cannot be opened.
        """
        self._target = _opened(path) if path is not None else os.dup(2)
        self._on_message = on_message
        self._source, self.descriptor = os.pipe()
        with contextlib.suppress(OSError):  # users with many pipes get small pipes
            fcntl.fcntl(self.descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._thread = threading.Thread(target=self._pass_on, name="gmmvit-access-log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what HAProxy has written, and close the log.  HAProxy must have ended.  It may be called again."""
        if self.descriptor < 0:
            return
        os.close(self.descriptor)
        self.descriptor = -1
        self._thread.join(timeout=5)

    def _pass_on(self) -> None:
        rest = b""
        while piece := os.read(self._source, _READ_BYTES):
            *lines, rest = (rest + piece).split(b"\n")
            self._write(lines)
            if len(piece) < _READ_BYTES:
                time.sleep(_PAUSE_S)
        self._write([rest] if rest else [])
        os.close(self._source)
        os.close(self._target)

    def _write(self, lines: list[bytes]) -> None:
        requests = b"".join(line + b"\n" for line in lines if line.startswith(b"{"))
        with contextlib.suppress(OSError):  # the disk is full, or the reader of stderr has ended
            while requests:
                requests = requests[os.write(self._target, requests) :]
        for line in lines:
            if line and not line.startswith(b"{"):
                self._on_message(line.decode(errors="replace"))


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as exc:
        raise OutputError(
            f"{path}: cannot open this file for the access log: {exc.strerror}",
            hint="type --access-log with a file in a folder that exists and that this user can write",
        ) from exc
