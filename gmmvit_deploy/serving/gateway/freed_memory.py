"""Return the memory that HAProxy has freed to the system.

HAProxy frees the buffers and streams of a burst of requests, but the C library keeps most of their pages: 6,400
unfinished requests on 100 connections left 60 to 110 MB, and the next burst as much again. On SIGQUIT, HAProxy flushes
its pools and calls malloc_trim, and the memory is that before the burst.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from gmmvit_deploy.serving.gateway.haproxy import HAProxy

__all__ = ["FreedMemory"]

_LOOK_S, _PAUSE_S = 2.0, 20.0
"""The time between two looks, and after memory was returned: requests wait for some milliseconds meanwhile."""
_MOST_KEPT_BYTES = 48 << 20
"""HAProxy itself resides in about 16 MB."""
_USED = re.compile(r"^PoolUsed_MB: (\d+)$", re.MULTILINE)


class FreedMemory:
    """Call `step` often."""

    def __init__(self) -> None:
        self._next_look = 0.0

    def step(self, haproxy: HAProxy) -> None:
        """Every two seconds: if HAProxy keeps more than 48 MiB that its pools do not use, let it return them.

        Errors: ServerError when HAProxy does not answer.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_S
        resident = _resident_bytes(haproxy.pid)
        if resident <= _MOST_KEPT_BYTES:
            return
        used = _USED.search(haproxy.command("show info"))
        if used is not None and resident - (int(used[1]) << 20) > _MOST_KEPT_BYTES:
            haproxy.return_memory()
            self._next_look = now + _PAUSE_S


def _resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
