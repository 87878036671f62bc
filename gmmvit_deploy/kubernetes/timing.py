"""Times of a pod, in seconds, which follow from those of ``gmmvit serve``.

    deletion of the pod ──PRE_STOP_S──> SIGTERM ──EXIT_S──> end, and SIGKILL after GRACE_S

The load balancers learn of the deletion while the preStop command sleeps, so the pod still accepts connections then.
`tests/kubernetes/test_probes.py` compares EXIT_S with the timeouts of the server, the gateway and the front.
"""

from __future__ import annotations

__all__ = [
    "EXIT_S",
    "GRACE_S",
    "LIVENESS",
    "PRE_STOP_S",
    "READINESS",
    "RESTART_S",
    "STARTUP",
    "START_TIMEOUT_S",
    "ProbeTimes",
]

from dataclasses import dataclass

PRE_STOP_S = 10
"""Endpoints and load balancers need some seconds to leave out a pod that is deleted."""
EXIT_S = 48
"""Gateway 23, front 5, server 20: the longest time from SIGTERM to the end of ``gmmvit serve``."""
GRACE_S = PRE_STOP_S + EXIT_S + 7
START_TIMEOUT_S = 120
"""``--start-timeout`` of the pod."""
RESTART_S = 20 + START_TIMEOUT_S
"""The supervisor begins a restart within 20 s, and a start may take START_TIMEOUT_S."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTimes:
    """period_s, timeout_s, failures: fields of a probe.  request_s: the ``--timeout`` of its command.

    The command sends three requests at most, so ``timeout_s`` is more than three times ``request_s``.
    """

    period_s: int
    timeout_s: int
    failures: int
    request_s: int

    @property
    def patience_s(self) -> int:
        """The time from the first failure until Kubernetes acts."""
        return self.period_s * self.failures


STARTUP = ProbeTimes(period_s=2, timeout_s=4, failures=75, request_s=1)
READINESS = ProbeTimes(period_s=5, timeout_s=10, failures=2, request_s=3)
LIVENESS = ProbeTimes(period_s=10, timeout_s=10, failures=18, request_s=3)
"""Longer than a restart by the supervisor: the kubelet acts only when the supervisor itself has failed."""
