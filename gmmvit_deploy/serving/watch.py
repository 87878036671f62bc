"""Send probes to the models of a running server, and decide from the answers which models are dead.

Each model gets a real inference every second. The probe of an ensemble is an inference of each model that the ensemble
runs, so these models get probes of their own only while the ensemble fails: they show which of the models is dead. A
probe that waits is not repeated until it is answered or late, so a busy server holds at most a probe for each model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.serving.health import ModelHealth
from gmmvit_deploy.serving.probes import Address, Answer, Probe, ask, model_names, probe_of_model, successes
from gmmvit_deploy.serving.processes import cpu_seconds
from gmmvit_deploy.serving.server import TritonServer
from gmmvit_deploy.serving.supervisor_metrics import SupervisorMetrics

__all__ = ["KnownModel", "ProbeTimes", "Watch", "groups_of"]

_FIRST_PROBE_S = 30.0
_NO_WORKER = "is not healthy"  # in Triton's message when the worker of a model has ended
_COMPUTING = 0.1
"""A worker that uses more than this part of a processor computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTimes:
    """interval_s: the time between two probes of a model, in seconds.
    least_timeout_s, most_timeout_s: the limits of the time for a probe, in seconds; within them, ten times the time of
    the first probe.
    """

    interval_s: float = 1.0
    least_timeout_s: float = 2.0
    most_timeout_s: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that answered a probe.  timeout_s: the maximum time for a probe, in seconds."""

    probe: Probe
    timeout_s: float


def groups_of(known: Iterable[KnownModel]) -> list[tuple[KnownModel, ...]]:
    """Return each model that no probed ensemble runs, followed by the models that it runs itself."""
    models = {entry.probe.model: entry for entry in known}
    inside = {part for entry in models.values() for part in entry.probe.parts}
    return [
        (entry, *(models[part] for part in entry.probe.parts if part in models))
        for model, entry in models.items()
        if model not in inside
    ]


class Watch:
    """Probes the models of a running server in threads, from the server's start to its end."""

    def __init__(
        self,
        server: TritonServer,
        times: ProbeTimes,
        metrics: SupervisorMetrics,
        known: dict[str, KnownModel | None],
    ) -> None:
        """Begin.

        known: model → its probe, or None for a model without probes. Each watch adds the models that are missing.
        """
        self.workers = server.workers
        self._server, self._times, self._metrics, self._known = server, times, metrics, known
        self._pid = server.pid
        self._http = Address(host=server.options.host, port=server.http_port)
        self._metrics_port = Address(host=server.options.metrics_host or server.options.host, port=server.metrics_port)
        self._groups: list[_Group] = []
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="gmmvit-probes", daemon=True).start()

    @property
    def reason(self) -> str:
        """Why a model is dead; empty if each model is alive."""
        return next((group.reason for group in self._groups if group.reason), "")

    def end(self) -> None:
        """End the threads.  A probe that is on the way ends later, by itself."""
        self._ended.set()

    def _run(self) -> None:
        for model in model_names(self._server.repository):
            if model not in self._known and not self._ended.is_set():
                self._first_probe(model)
        counts = successes(self._metrics_port) or {}
        groups = groups_of(entry for entry in self._known.values() if entry is not None)
        self._groups = [_Group(models, counts) for models in groups]
        for group in self._groups:
            threading.Thread(target=self._repeat, args=(group,), name="gmmvit-probes", daemon=True).start()

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
            rest = "only its models get probes" if probe.parts else "only its processes are watched"
            self._server.note(f"{model} refuses a probe, so {rest}: {answer.detail}")
            self._known[model] = None
            return
        longest_s = min(max(10 * answer.seconds, self._times.least_timeout_s), self._times.most_timeout_s)
        self._known[model] = KnownModel(probe=probe, timeout_s=longest_s)

    def _repeat(self, group: _Group) -> None:
        due = time.monotonic() + self._times.interval_s
        with ThreadPoolExecutor(max_workers=len(group.models)) as pool:
            while not self._ended.wait(max(0.0, due - time.monotonic())) and not self.reason:
                due = time.monotonic() + self._times.interval_s
                self._look(group, pool)

    def _look(self, group: _Group, pool: ThreadPoolExecutor) -> None:
        targets = group.targets()
        cpu_s, began = self._cpu_seconds(group), time.monotonic()
        answers = list(pool.map(lambda known: ask(self._http, known.probe, known.timeout_s), targets))
        spent_s, elapsed_s = self._cpu_seconds(group), time.monotonic() - began
        for known, answer in zip(targets, answers, strict=True):
            self._metrics.count_probe(known.probe.model, answer.result)
        computing = {model for model, seconds in spent_s.items() if seconds - cpu_s[model] > _COMPUTING * elapsed_s}
        group.observe(answers, successes(self._metrics_port), computing, now_s=time.monotonic())

    def _cpu_seconds(self, group: _Group) -> dict[str, float]:
        """Return model → processor time of its workers, or of the server for a model without workers."""
        own = cpu_seconds((self._pid,))
        pids = {model: tuple(w.pid for w in self.workers if w.model == model) for model in group.names}
        return {model: cpu_seconds(workers) if workers else own for model, workers in pids.items()}


class _Group:
    """A model with the models that it runs, if it is an ensemble: their health, and how many requests they completed.

    names: of the models that compute; an ensemble itself does not compute.
    """

    def __init__(self, models: tuple[KnownModel, ...], counts: Mapping[str, int]) -> None:
        """counts: model → number of completed requests at the beginning."""
        self.models = models
        self.names = models[0].probe.parts or (models[0].probe.model,)
        self._health = {known.probe.model: ModelHealth(known.probe.model) for known in models}
        self._counts = dict(counts)
        self._suspected = False

    @property
    def reason(self) -> str:
        return next((health.reason for health in self._health.values() if health.reason), "")

    def targets(self) -> tuple[KnownModel, ...]:
        """Return the models to probe now: the first, and the models that it runs if its last probe failed."""
        return self.models if self._suspected else self.models[:1]

    def observe(
        self, answers: list[Answer], counts: Mapping[str, int] | None, computing: set[str], *, now_s: float
    ) -> None:
        """Add the answers to the probes of `targets`.

        counts: model → number of completed requests after the answers; None if the server did not state it.
        computing: the models that used the processor while the probes waited.
        now_s: as for `ModelHealth.observe`.
        """
        targets, first = self.targets(), self.models[0].probe
        moved = {model: count - self._counts.get(model, 0) for model, count in (counts or {}).items()}
        sent = dict.fromkeys((first.model, *first.parts), 1)  # probes that can count as a completed request
        answered = dict.fromkeys(sent, int(answers[0].result == "answered"))
        for known, answer in zip(targets[1:], answers[1:], strict=True):
            sent[known.probe.model] += 1
            answered[known.probe.model] += int(answer.result == "answered")
        for known, answer in zip(targets, answers, strict=True):
            model, parts = known.probe.model, known.probe.parts
            # A probe that an ensemble's model has completed shows that this model is alive, not that the ensemble is.
            others = moved.get(model, 0) > 0 or any(moved.get(part, 0) > sent[part] for part in parts if part in sent)
            busy = bool(computing & {model, *parts})
            self._health[model].observe(answer, others_answered=others, computing=busy, now_s=now_s)
        if answers[0].result == "answered":
            for health in self._health.values():
                health.observe_traffic()
        self._suspected = answers[0].result != "answered"
        if counts is not None:
            # Triton counts a request some time after the answer; the probe must not look like a client's request.
            least = {model: self._counts.get(model, 0) + number for model, number in answered.items()}
            self._counts = {model: max(count, least.get(model, 0)) for model, count in counts.items()}
