"""Count what clients got from each place during a canary, from the lines of the gateway's access log.

Probes of the supervisor and checks of HAProxy do not appear in the access log, so they are not counted. A request that
is lost because its server ended appears there, with HAProxy's reason.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from gmmvit_deploy.serving.rollout.canary import Counts

__all__ = ["Traffic"]

_INFERENCES = ("/infer", "/ModelInfer")
_UNAVAILABLE = (503, "8", "14")
"""Refusals of overload: HTTP status, and statuses of gRPC."""


class Traffic:
    """Counts of inference requests by place."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])

    def count(self, line: bytes) -> None:
        """Count the request of a line of the access log; other lines are ignored."""
        try:
            request = json.loads(line)
            if not request["path"].endswith(_INFERENCES):
                return
            answered = _answered(request)
            time_us = max(0, request["network_us"] - 1000 * max(0, request["queue_ms"]))
            place = str(request["server"])
        except (ValueError, KeyError, TypeError, AttributeError):
            return
        if answered is not None:
            with self._lock:
                sums = self._sums[place]
                sums[0 if answered else 1] += 1
                sums[2] += time_us if answered else 0

    def counts(self, place: str) -> Counts:
        """Return what a place did since this object was made."""
        with self._lock:
            answered, failed, time_us = self._sums[place]
        return Counts(answered=answered, failed=failed, time_us=time_us)


def _answered(request: Mapping[str, Any]) -> bool | None:
    """Return whether the server answered a request; None if the client left, or if the request was refused unheard.

    Both servers get the same mixture of requests, so mistakes of clients count as failures of both.
    """
    end = request["end"]
    if end == "sQ" or end[:1] not in "-SsP":
        return None
    if end[:1] != "-":  # HAProxy's S, s and P: the server closed the connection, was late, or answered no HTTP
        return False
    status = request["grpc_status"] if request["protocol"] == "grpc" else request["status"]
    if status in _UNAVAILABLE:
        return None
    return status in ("", "-", "0") or (isinstance(status, int) and 200 <= status < 400)
