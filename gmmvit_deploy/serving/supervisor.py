"""Keep a server running: notice that it has died, and restart it on the same ports.

exit      the server has ended
worker    a worker process of the Python backend has ended
probe     a model failed two probes in sequence (`health`)

Every second, each model that completed no request of a client since the last look gets a probe (`probes`). A model
under load needs no probe, so that probes take part in no measurement of a busy server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gmmvit_deploy.errors import GmmvitError, ServerError
from gmmvit_deploy.serving.health import ModelHealth
from gmmvit_deploy.serving.probes import Address, Probe, ask, model_names, probe_of_model, successes
from gmmvit_deploy.serving.processes import cpu_seconds, is_alive
from gmmvit_deploy.serving.server import TritonServer
from gmmvit_deploy.serving.supervisor_metrics import RestartReason, SupervisorMetrics, fetched_metrics

__all__ = ["Supervisor", "SupervisorOptions"]

_POLL_S = 0.05
_FIRST_PROBE_S = 30.0
_NO_WORKER = "is not healthy"  # in Triton's message when the worker of a model has ended
_COMPUTING = 0.1
"""A worker that uses more than this part of a processor computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorOptions:
    """Options of a supervisor.

    interval_s: the time between two looks at the models, in seconds.
    least_timeout_s, most_timeout_s: the limits of the time for a probe, in seconds; within them, ten times the time of
    the first probe.
    delays_s: the times before the first, second, … restart in sequence, in seconds; the last is repeated.
    steady_s: the time after which the sequence of restarts begins again, in seconds.
    most_failed_restarts: the number of restarts in sequence after which the server was not ready; then the supervisor
    gives up.
    """

    interval_s: float = 1.0
    least_timeout_s: float = 2.0
    most_timeout_s: float = 20.0
    delays_s: tuple[float, ...] = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
    steady_s: float = 60.0
    most_failed_restarts: int = 5


class Supervisor:
    """Watches a started server, and restarts the server when it is dead."""

    def __init__(self, server: TritonServer, options: SupervisorOptions | None = None) -> None:
        self.server = server
        self.options = options or SupervisorOptions()
        self.metrics = SupervisorMetrics()
        self._known: dict[str, _Known | None] = {}
        self._watch: _Watch | None = None
        self._in_sequence = 0
        self._ready_at = 0.0

    def metrics_text(self) -> str:
        """Return the metrics of the server and of the supervisor, in Prometheus's text format."""
        theirs = fetched_metrics(self.server.metrics_url) if self.server.pid else ""
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
        if self._watch is None:
            self._begin_watch()
        problem = self._problem()
        if problem is not None:
            self._restart(*problem, stopped)

    def _begin_watch(self) -> None:
        self._ready_at = time.monotonic()
        self._watch = _Watch(self.server, self.options, self.metrics, self._known)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """A model that answered a probe.  timeout_s: the maximum time for a probe, in seconds."""

    probe: Probe
    timeout_s: float


class _Watch:
    """Probes the models of a running server in a thread, from the server's start to its end."""

    def __init__(
        self,
        server: TritonServer,
        options: SupervisorOptions,
        metrics: SupervisorMetrics,
        known: dict[str, _Known | None],
    ) -> None:
        """Begin.

        known: model → its probe, or None for a model without probes. Each watch adds the models that are missing.
        """
        self.workers = server.workers
        self.reason = ""
        self._server, self._options, self._metrics, self._known = server, options, metrics, known
        self._pid = server.pid
        self._http = Address(host=server.options.host, port=server.http_port)
        self._metrics_port = Address(host=server.options.metrics_host or server.options.host, port=server.metrics_port)
        self._health: dict[str, ModelHealth] = {}
        self._counts: dict[str, int] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gmmvit-probes", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread.  A probe that is on the way ends later, by itself."""
        self._ended.set()

    def _run(self) -> None:
        for model in model_names(self._server.repository):
            if model not in self._known and not self._ended.is_set():
                self._first_probe(model)
        probed = {model: known for model, known in self._known.items() if known is not None}
        self._health = {model: ModelHealth(model) for model in probed}
        self._counts = successes(self._metrics_port)
        with ThreadPoolExecutor(max_workers=max(1, len(probed))) as pool:
            while not self._ended.wait(self._options.interval_s) and not self.reason:
                self._look(probed, pool)

    def _first_probe(self, model: str) -> None:
        """Add a model to the known models, and measure the time that a probe takes."""
        try:
            probe = probe_of_model(self._http, model)
            answer = ask(self._http, probe, _FIRST_PROBE_S) if probe is not None else None
        except ServerError as exc:
            if not self._ended.is_set():
                self._server.note(f"only the processes of {model} are watched until a restart: {exc}")
            return
        if self._ended.is_set():  # the server has ended, which explains each answer
            return
        if probe is None or answer is None:
            self._known[model] = None
            return
        self._metrics.count_probe(model, answer.result)
        if answer.result == "refused" and _NO_WORKER not in answer.detail:
            self._server.note(f"only the processes of {model} are watched: it refuses a probe: {answer.detail}")
            self._known[model] = None
            return
        longest_s = min(max(10 * answer.seconds, self._options.least_timeout_s), self._options.most_timeout_s)
        self._known[model] = _Known(probe=probe, timeout_s=longest_s)

    def _look(self, probed: dict[str, _Known], pool: ThreadPoolExecutor) -> None:
        """Probe each model that has completed no request since the last look."""
        before, cpu_s, began = successes(self._metrics_port), self._cpu_seconds(), time.monotonic()
        idle = []
        for model, known in probed.items():
            if _others(model, self._counts, before):
                self._health[model].observe_traffic()
            else:
                idle.append(known)
        answers = list(pool.map(lambda known: ask(self._http, known.probe, known.timeout_s), idle))
        after, spent_s, elapsed_s = successes(self._metrics_port), self._cpu_seconds(), time.monotonic() - began
        for known, answer in zip(idle, answers, strict=True):
            model = known.probe.model
            self._metrics.count_probe(model, answer.result)
            own = int(answer.result == "answered")
            computed_s = spent_s[model] - cpu_s[model]
            self._health[model].observe(
                answer,
                others_answered=_others(model, before, after, own=own),
                computing=computed_s > _COMPUTING * elapsed_s,
                now_s=time.monotonic(),
            )
            if before is not None and after is not None:
                # Triton counts a request some time after the answer; the probe must not look like a client's request.
                after[model] = max(after.get(model, 0), before.get(model, 0) + own)
        self._counts = after
        self.reason = next((health.reason for health in self._health.values() if health.reason), "")

    def _cpu_seconds(self) -> dict[str, float]:
        """Return model → processor time of its workers, or of the server for a model without workers."""
        own = cpu_seconds((self._pid,))
        pids = {model: tuple(w.pid for w in self.workers if w.model == model) for model in self._health}
        return {model: cpu_seconds(workers) if workers else own for model, workers in pids.items()}


def _others(model: str, before: dict[str, int] | None, after: dict[str, int] | None, *, own: int = 0) -> bool:
    """Return whether a model completed requests of clients between two readings.

    own: the number of probes among the completed requests.
    """
    if before is None or after is None:
        return False
    return after.get(model, 0) - before.get(model, 0) > own
