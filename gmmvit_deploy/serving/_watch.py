"""Ask each model of a running server for an inference now and then, and notice a model that is dead.

    answered                                          alive
    late or refused, but other requests completed     alive: the probe waits behind other requests
    late, and a worker of the model computes          alive for a minute: the probe waits behind a large request
    otherwise                                         a failure; the second in sequence means that the model is dead

A model computes a probe like every other request, so a large model gets fewer: the interval is a hundred times as long
as the quickest answer took, at least a second and at most ten. After a failure it is a second.

An ensemble does not compute, so the models that it runs get the probes. A model's probe that waits is not repeated
until it is answered or late, so a busy server holds at most a probe for each model.
"""

from __future__ import annotations

import threading
import time

from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.serving._metric_text import SupervisorMetrics
from gmmvit_deploy.serving._probes import Address, Probe, ask, probe_of_model, successes
from gmmvit_deploy.serving.processes import cpu_seconds
from gmmvit_deploy.serving.server import TritonServer

_MOST_FAILURES = 2
_QUICK_S = 0.01
"""A model that answers a probe within this time gets the next probe after the shortest interval."""
_LONGEST = 10
"""The longest interval, relative to the shortest."""
_MOST_COMPUTING_S = 60.0
_COMPUTING = 0.1
"""A worker that uses more than this part of a processor computes."""
_NO_WORKER = "is not healthy"  # in Triton's message when the worker of a model has ended


class Watch:
    """Probes the models of a running server in threads, from the server's start to its end.

    workers: the worker processes when the server was ready.  reason: why a model is dead; empty if each is alive.
    """

    def __init__(
        self,
        server: TritonServer,
        metrics: SupervisorMetrics,
        answered: set[str],
        *,
        interval_s: float = 1.0,
        timeout_s: float = 8.0,
    ) -> None:
        """Begin.

        answered: the models that have answered a probe since the first start. Each watch adds models.
        interval_s: the shortest interval between two probes of a model, in seconds.
        timeout_s: the maximum time for an answer, in seconds.
        """
        self.workers = server.workers
        self.reason = ""
        self._server, self._metrics, self._answered = server, metrics, answered
        self._pid = server.pid
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._http = Address(host=server.options.host, port=server.http_port)
        self._metrics_port = Address(host=server.options.metrics_host or server.options.host, port=server.metrics_port)
        self._ended = threading.Event()
        for model in server.models.names:
            threading.Thread(target=self._repeat, args=(model,), name=f"gmmvit-probe-{model}", daemon=True).start()

    def end(self) -> None:
        """End the threads.  A probe that is on the way ends later, by itself."""
        self._ended.set()

    def _repeat(self, model: str) -> None:
        probe = self._probe(model)
        failures, computing_since, quickest_s = 0, 0.0, 0.0
        while probe is not None and not self._ended.is_set() and not self.reason:
            completed, cpu_s, began = self._completed(model), self._cpu_seconds(model), time.monotonic()
            answer = ask(self._http, probe, self._timeout_s)
            if self._ended.is_set():  # the server has ended, which explains each answer
                return
            self._metrics.count_probe(model, answer.result)
            if answer.result == "answered":
                self._answered.add(model)
                quickest_s = min(quickest_s or answer.seconds, answer.seconds)
            elif answer.result == "refused" and model not in self._answered and _NO_WORKER not in answer.detail:
                self._server.note(f"{model} refuses a probe, so only its processes are watched: {answer.detail}")
                return
            used_s = self._cpu_seconds(model) - cpu_s
            # Triton counts a request that the model answers later when the model takes it, so a late probe may count.
            others = self._completed(model) - completed - (answer.result == "late")
            if answer.result == "answered" or others > 0:
                failures, computing_since = 0, 0.0
            elif answer.result == "late" and used_s > _COMPUTING * (time.monotonic() - began):
                computing_since = computing_since or began
                failures += time.monotonic() - computing_since > _MOST_COMPUTING_S
            else:
                failures += 1
            if failures >= _MOST_FAILURES:
                self.reason = f"{model} failed {_MOST_FAILURES} probes in sequence: {answer.detail}"
            longer = 1.0 if failures else min(max(quickest_s / _QUICK_S, 1.0), _LONGEST)
            self._ended.wait(longer * self._interval_s)

    def _probe(self, model: str) -> Probe | None:
        """Return the probe of a model; None for an ensemble, and for a model with inputs without a known example."""
        while not self._ended.is_set():
            try:
                probe = probe_of_model(self._http, model)
            except ServerError:  # a server that is too busy to state its configuration
                self._ended.wait(self._interval_s)
                continue
            return None if probe is None or probe.parts else probe
        return None

    def _cpu_seconds(self, model: str) -> float:
        """Return the processor time of the model's workers, or of the server for a model without workers."""
        return cpu_seconds([worker.pid for worker in self.workers if worker.model == model] or [self._pid])

    def _completed(self, model: str) -> int:
        """Return the number of requests that the model has completed; 0 if the server does not state it."""
        return (successes(self._metrics_port) or {}).get(model, 0)
