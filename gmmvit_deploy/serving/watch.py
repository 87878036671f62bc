"""Ask each model of a running server for an inference every second, and notice a model that is dead.

    answered                                          alive
    late or refused, but other requests completed     alive: the probe waits behind other requests
    otherwise                                         a failure; the second in sequence means that the model is dead

An ensemble does not compute, so the models that it runs get the probes. A model's probe that waits is not repeated
until it is answered or late, so a busy server holds at most a probe for each model.
"""

from __future__ import annotations

import threading

from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.serving.probes import Address, Answer, Probe, ask, model_names, probe_of_model, successes
from gmmvit_deploy.serving.server import TritonServer
from gmmvit_deploy.serving.supervisor_metrics import SupervisorMetrics

__all__ = ["Watch"]

_MOST_FAILURES = 2
_NO_WORKER = "is not healthy"  # in Triton's message when the worker of a model has ended


class Watch:
    """Probes the models of a running server in threads, from the server's start to its end.

    workers: the worker processes when the server was ready.  reason: why a model is dead; empty if each is alive.
    """

    def __init__(
        self, server: TritonServer, metrics: SupervisorMetrics, *, interval_s: float = 1.0, timeout_s: float = 8.0
    ) -> None:
        """Begin.

        interval_s: the time between two probes of a model.  timeout_s: the maximum time for an answer. Both in seconds.
        """
        self.workers = server.workers
        self.reason = ""
        self._server, self._metrics = server, metrics
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._http = Address(host=server.options.host, port=server.http_port)
        self._metrics_port = Address(host=server.options.metrics_host or server.options.host, port=server.metrics_port)
        self._ended = threading.Event()
        for model in model_names(server.repository):
            threading.Thread(target=self._repeat, args=(model,), name=f"gmmvit-probe-{model}", daemon=True).start()

    def end(self) -> None:
        """End the threads.  A probe that is on the way ends later, by itself."""
        self._ended.set()

    def _repeat(self, model: str) -> None:
        probe = self._probe(model)
        failures, completed, first = 0, self._completed(model), True
        while probe is not None and not self._ended.is_set() and not self.reason:
            answer = ask(self._http, probe, self._timeout_s)
            if self._ended.is_set():  # the server has ended, which explains each answer
                return
            self._metrics.count_probe(model, answer.result)
            if first and answer.result == "refused" and _NO_WORKER not in answer.detail:
                self._server.note(f"{model} refuses a probe, so only its processes are watched: {answer.detail}")
                return
            first = False
            before, completed = completed, self._completed(model)
            failures = 0 if answer.result == "answered" or completed > before else failures + 1
            if failures == _MOST_FAILURES:
                self.reason = _dead(model, answer)
            self._ended.wait(self._interval_s)

    def _probe(self, model: str) -> Probe | None:
        """Return the probe of a model; None for an ensemble, and for a model with inputs without a known example."""
        try:
            probe = probe_of_model(self._http, model)
        except ServerError as exc:
            if not self._ended.is_set():
                self._server.note(f"only the processes of {model} are watched until a restart: {exc}")
            return None
        return None if probe is None or probe.parts else probe

    def _completed(self, model: str) -> int:
        """Return the number of requests that the model has completed; 0 if the server does not state it."""
        return (successes(self._metrics_port) or {}).get(model, 0)


def _dead(model: str, answer: Answer) -> str:
    return f"{model} failed {_MOST_FAILURES} probes in sequence: {answer.detail}"
