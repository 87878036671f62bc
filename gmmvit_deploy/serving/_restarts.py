"""How often a process may end and be started again."""

from __future__ import annotations

import time
from collections import deque

from gmmvit_deploy.errors import ServerError

_MOST, _WINDOW_S = 5, 60.0


class Restarts:
    """Counts the restarts of a process, and allows five in a minute.

    process: its name in the error.  count: the restarts so far.
    """

    def __init__(self, process: str) -> None:
        self.process, self.count = process, 0
        self._last: deque[float] = deque(maxlen=_MOST)

    def add(self, why: str) -> None:
        """Count a restart.  Errors: ServerError, with ``why``, when the process ends again and again."""
        now = time.monotonic()
        if len(self._last) == _MOST and now - self._last[0] < _WINDOW_S:
            raise ServerError(f"{self.process} ended {_MOST + 1} times in a minute: {why}")
        self._last.append(now)
        self.count += 1
