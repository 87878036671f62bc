"""Keep a server running: notice that it has died, and restart it on the same ports.

exit      the server has ended
worker    a worker process of the Python backend has ended
probe     a model failed two probes in sequence (`_watch`)
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from gmmvit_deploy.errors import GmmvitError, ServerError
from gmmvit_deploy.serving._local_http import text_from_url
from gmmvit_deploy.serving._metric_text import RestartReason, SupervisorMetrics
from gmmvit_deploy.serving._watch import Watch
from gmmvit_deploy.serving.processes import is_alive
from gmmvit_deploy.serving.server import TritonServer

_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorOptions:
    """Options of a supervisor.

    probe_interval_s: the shortest interval between two probes of a model, in seconds.
    delays_s: the times before the first, second, … restart in sequence, in seconds; the last is repeated.
    steady_s: the time after which the sequence of restarts begins again, in seconds.
    most_failed_restarts: the number of restarts in sequence after which the server was not ready; then the supervisor
    gives up.
    """

    probe_interval_s: float = 1.0
    delays_s: tuple[float, ...] = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
    steady_s: float = 60.0
    most_failed_restarts: int = 5


class Supervisor:
    """Watches a started server, and restarts the server when it is dead."""

    def __init__(self, server: TritonServer, options: SupervisorOptions | None = None) -> None:
        self.server = server
        self.options = options or SupervisorOptions()
        self.metrics = SupervisorMetrics()
        self._answered: set[str] = set()
        self._watch: Watch | None = None
        self._in_sequence = 0
        self._ready_at = 0.0

    def metrics_text(self) -> str:
        """Return the metrics of the server and of the supervisor, in Prometheus's text format."""
        theirs = ""
        with suppress(OSError, http.client.HTTPException):  # the server starts, or has ended
            theirs = text_from_url(self.server.metrics_url, timeout_s=2) if self.server.pid else ""
        return theirs + self.metrics.text()

    def run(self, stopped: Callable[[], bool]) -> None:
        """Watch the server until ``stopped`` returns True.  Call this method from the thread that started the server.

        Errors: ServerError when the server was not ready after `SupervisorOptions.most_failed_restarts` restarts.
        """
        try:
            while not stopped():
                self.step(stopped)
                time.sleep(_POLL_S)
        finally:
            self.close()

    def close(self) -> None:
        """End the watch; the server stays as it is."""
        self._end_watch()
        self.metrics.up = False

    def step(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Look once, and restart the server if it is dead.  Errors: as for `run`."""
        problem = self.look()
        if problem is not None:
            self._restart(*problem, stopped)

    def look(self) -> tuple[RestartReason, str] | None:
        """Look once, and return why the server is dead, or None.  The server is not restarted."""
        if self._watch is None:
            self._begin_watch()
        return self._problem()

    def _begin_watch(self) -> None:
        self._ready_at = time.monotonic()
        self._watch = Watch(self.server, self.metrics, self._answered, interval_s=self.options.probe_interval_s)
        self.metrics.up = True

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    def _problem(self) -> tuple[RestartReason, str] | None:
        try:
            self.server.require_running()
        except ServerError as exc:
            return "exit", str(exc).partition("\n")[0]
        if self._watch is None:
            return None
        for worker in self._watch.workers:
            if not is_alive(worker):
                return "worker", f"worker {worker.pid} of model {worker.model} has ended"
        return ("probe", self._watch.reason) if self._watch.reason else None

    def _restart(self, reason: RestartReason, detail: str, stopped: Callable[[], bool]) -> None:
        self.metrics.up = False
        self.metrics.count_restart(reason)
        self._end_watch()
        self.server.kill_now()  # clients get an error at once, and do not wait for a dead worker
        if time.monotonic() - self._ready_at >= self.options.steady_s:
            self._in_sequence = 0
        failures = 0
        while not stopped():
            delay_s = self.options.delays_s[min(self._in_sequence, len(self.options.delays_s) - 1)]
            self._in_sequence += 1
            self.server.note(f"{detail}; restart {self.metrics.restarts} of the server begins after {delay_s:g} s")
            if _slept(delay_s, stopped):
                return
            began = time.monotonic()
            try:
                self.server.restart(cancelled=stopped)
            except GmmvitError as exc:
                failures += 1
                self.metrics.count_failed_restart()
                if failures >= self.options.most_failed_restarts:
                    raise
                detail = f"the restart failed: {exc}"
                continue
            if not stopped():
                self.server.note(f"the server is ready again after {time.monotonic() - began:.1f} s")
                self._begin_watch()
            return


def _slept(seconds: float, stopped: Callable[[], bool]) -> bool:
    """Sleep, and return whether ``stopped`` returned True in the meantime."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not stopped():
        time.sleep(_POLL_S)
    return stopped()
