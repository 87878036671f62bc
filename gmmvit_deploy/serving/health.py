"""Decide from probes whether a model is dead, or alive under load.

answered                           alive
requests of clients completed      alive: a probe that is late or refused at that time waits behind other requests
late, and its worker computes      alive for a limited time: a large request may take longer than a probe may wait
otherwise                          a failure; the second in sequence means that the model is dead
"""

from __future__ import annotations

from gmmvit_deploy.serving.probes import Answer

__all__ = ["ModelHealth"]


class ModelHealth:
    """The state of a model."""

    def __init__(self, model: str, *, most_failures: int = 2, computing_limit_s: float = 60.0) -> None:
        """Begin without a failure.

        most_failures: the number of failures in sequence after which the model is dead.
        computing_limit_s: the maximum time in seconds for which a late model is alive because its worker computes.
        """
        self.model = model
        self._most_failures = most_failures
        self._computing_limit_s = computing_limit_s
        self._failures = 0
        self._computing_since: float | None = None
        self._detail = ""

    @property
    def reason(self) -> str:
        """Why the model is dead; empty if the model is alive."""
        if self._failures < self._most_failures:
            return ""
        return f"{self.model} failed {self._failures} probes in sequence: {self._detail}"

    def observe(self, answer: Answer, *, others_answered: bool, computing: bool, now_s: float) -> None:
        """Add the answer to a probe.

        others_answered: True if the model completed requests of clients while the probe waited.
        computing: True if the worker of the model used the processor while the probe waited.
        now_s: the time on a clock that never goes back, in seconds.
        """
        if answer.result == "answered" or others_answered:
            self.observe_traffic()
            return
        if answer.result == "late" and computing:
            self._computing_since = now_s if self._computing_since is None else self._computing_since
            if now_s - self._computing_since < self._computing_limit_s:
                return
        self._failures += 1
        self._detail = answer.detail

    def observe_traffic(self) -> None:
        """Add that the model completed requests of clients since the last probe."""
        self._failures = 0
        self._computing_since = None
