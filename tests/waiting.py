"""Wait for what a test can see, and repeat what a test measures: tests do not sleep for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

_POLL_S = 0.02
_Seen = TypeVar("_Seen")


def wait_until(
    condition: Callable[[], _Seen],
    what: str,
    *,
    within_s: float = 60.0,
    poll_s: float = _POLL_S,
    step: Callable[[], object] = lambda: None,
) -> _Seen:
    """Wait until the condition returns something true, and return it; fail the test after ``within_s`` seconds.

    what: the condition in words, for the message.  poll_s: the time between two looks.
    step: called before each further look, such as the `step` of a supervisor.
    """
    end = time.monotonic() + within_s
    while not (seen := condition()):
        if time.monotonic() > end:
            pytest.fail(f"not within {within_s:g} s: {what}")
        step()
        time.sleep(poll_s)
    return seen


def best_of(attempts: int, measure: Callable[[], float], *, enough: float) -> float:
    """Measure up to ``attempts`` times, stop at the first value that is at most ``enough``, and return the smallest.

    For a time or a size that the documentation promises: other programs of the machine can only make it larger. Such a
    test bears the marker ``alone``.
    """
    values = [measure()]
    while min(values) > enough and len(values) < attempts:
        values.append(measure())
    return min(values)


def everything_was_read(port: int) -> bool:
    """Return whether the process that listens on a port of 127.0.0.1 has read all that its clients have sent.

    False while there is no connection. A client must have sent its bytes before: ``sendall`` has returned.
    """
    rows = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
    received, unread = 0, 0
    for _, local, remote, state, queues, *_ in rows:
        unsent, unreceived = (int(part, 16) for part in queues.split(":"))
        if state == "01" and _port(local) == port:
            received, unread = received + 1, unread + unreceived
        elif state == "01" and _port(remote) == port:
            unread += unsent
    return received > 0 and unread == 0


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)
