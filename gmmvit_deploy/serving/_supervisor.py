"""Keep a server running: notice that it has died, and restart it on the same ports.

exit      the server has ended
worker    a worker process of the Python backend has ended
probe     a model failed two probes in sequence

A probe is an inference that a `Watch` requests of each model now and then, with a batch of one of zeros, or with a PNG
image for an input of bytes. A server whose worker has died still reports that it is ready. What the answer means:

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

import http.client
import io
import json
import math
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from gmmvit_deploy.errors import GmmvitError, ServerError
from gmmvit_deploy.inference import PROBE_ID
from gmmvit_deploy.serving._local_http import text_from_url
from gmmvit_deploy.serving._metric_text import RestartReason, SupervisorMetrics, samples_in
from gmmvit_deploy.serving.processes import cpu_seconds, is_alive
from gmmvit_deploy.serving.server import TritonServer

_POLL_S = 0.05
_MAX_FAILURES = 2
_ANSWER_S = 8.0
_METRICS_S = 2.0
_QUICK_S = 0.01
"""A model that answers a probe within this time gets the next probe after the shortest interval."""
_MAX_INTERVAL = 10
"""The longest interval, relative to the shortest."""
_MAX_COMPUTING_S = 60.0
_COMPUTING = 0.1
"""A worker that uses more than this part of a processor computes."""
_NO_WORKER = "is not healthy"  # in Triton's message when the worker of a model has ended
_BYTES = {"BOOL": 1, "UINT8": 1, "INT8": 1, "UINT16": 2, "INT16": 2, "FP16": 2, "BF16": 2, "UINT32": 4, "INT32": 4}
_BYTES |= {"FP32": 4, "UINT64": 8, "INT64": 8, "FP64": 8}
_CONFIG_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A request for an inference of a model.  json_bytes: the length of the JSON at the beginning of ``body``."""

    model: str
    body: bytes
    json_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of a probe.

    result: ``answered``; ``refused``, with an error status; ``late``, without an answer in time; ``unreachable``.
    detail: the error; empty for ``answered``.  seconds: the time that the probe took.
    """

    result: Literal["answered", "refused", "late", "unreachable"]
    detail: str = ""
    seconds: float = 0.0


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
        interval_s: float,
    ) -> None:
        """Start.

        answered: the models that have answered a probe since the first start. Each watch adds models.
        interval_s: the shortest interval between two probes of a model, in seconds.
        """
        self.workers = server.workers
        self.reason = ""
        self._server, self._metrics, self._answered = server, metrics, answered
        self._pid = server.pid
        self._interval_s = interval_s
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
            before, cpu_s, began = self._completed(model), self._cpu_seconds(model), time.monotonic()
            answer = ask(self._server.options.host, self._server.http_port, probe, _ANSWER_S)
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
            others = self._completed(model) - before - (answer.result == "late")
            if answer.result == "answered" or others > 0:
                failures, computing_since = 0, 0.0
            elif answer.result == "late" and used_s > _COMPUTING * (time.monotonic() - began):
                computing_since = computing_since or began
                failures += time.monotonic() - computing_since > _MAX_COMPUTING_S
            else:
                failures += 1
            if failures >= _MAX_FAILURES:
                self.reason = f"{model} failed {_MAX_FAILURES} probes in sequence: {answer.detail}"
            longer = 1.0 if failures else min(max(quickest_s / _QUICK_S, 1.0), _MAX_INTERVAL)
            self._ended.wait(longer * self._interval_s)

    def _probe(self, model: str) -> Probe | None:
        """Return the probe of a model, or None as `probe_of_model`."""
        while not self._ended.is_set():
            try:
                return probe_of_model(self._server.http_url, model)
            except ServerError:  # a server that is too busy to state its configuration
                self._ended.wait(self._interval_s)
        return None

    def _completed(self, model: str) -> float:
        """Return how many requests a model has completed since the server started; 0 without an answer."""
        try:
            text = text_from_url(self._server.metrics_url, timeout_s=_METRICS_S)
        except (OSError, http.client.HTTPException):
            return 0.0
        # A sample for each version of a model.
        samples = samples_in(text, "nv_inference_request_success")
        return sum(count for labels, count in samples if labels["model"] == model)

    def _cpu_seconds(self, model: str) -> float:
        """Return the processor time of the model's workers, or of the server for a model without workers."""
        return cpu_seconds([worker.pid for worker in self.workers if worker.model == model] or [self._pid])


class Supervisor:
    """Watches a started server, and restarts the server when it is dead.

    probe_interval_s: the shortest interval between two probes of a model, in seconds.
    delays_s: the times before the first, second, … restart in sequence, in seconds; the last is repeated.
    steady_s: the time after which the sequence of restarts starts again, in seconds.
    max_failed_restarts: the restarts in sequence after which the server was not ready; then the supervisor gives up.
    """

    probe_interval_s = 1.0
    delays_s: tuple[float, ...] = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
    steady_s = 60.0
    max_failed_restarts = 5

    def __init__(self, server: TritonServer) -> None:
        self.server = server
        self.metrics = SupervisorMetrics()
        self._answered: set[str] = set()
        self._watch: Watch | None = None
        self._in_sequence = 0
        self._ready_at = 0.0

    def metrics_text(self) -> str:
        """Return the metrics of the server and of the supervisor, in Prometheus's text format."""
        server_metrics = ""
        with suppress(OSError, http.client.HTTPException):  # the server starts, or has ended
            server_metrics = text_from_url(self.server.metrics_url) if self.server.pid else ""
        return server_metrics + self.metrics.text()

    def close(self) -> None:
        """End the watch; the server stays as it is."""
        if self._watch is not None:
            self._watch.end()
            self._watch = None
        self.metrics.up = False

    def step(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Look once, and restart the server if it is dead.  Call it from the thread that started the server.

        Errors: ServerError when the server was not ready after ``max_failed_restarts`` restarts.
        """
        problem = self.look()
        if problem is not None:
            self._restart(*problem, stopped)

    def look(self) -> tuple[RestartReason, str] | None:
        """Look once, and return why the server is dead, or None.  The server is not restarted."""
        watch = self._watch or self._started_watch()
        try:
            self.server.require_running()
        except ServerError as exc:
            return "exit", str(exc).partition("\n")[0]
        for worker in watch.workers:
            if not is_alive(worker):
                return "worker", f"worker {worker.pid} of model {worker.model} has ended"
        return ("probe", watch.reason) if watch.reason else None

    def _started_watch(self) -> Watch:
        self._ready_at = time.monotonic()
        self._watch = watch = Watch(self.server, self.metrics, self._answered, interval_s=self.probe_interval_s)
        self.metrics.up = True
        return watch

    def _restart(self, reason: RestartReason, detail: str, stopped: Callable[[], bool]) -> None:
        self.close()
        self.metrics.count_restart(reason)
        self.server.kill_now()  # clients get an error at once, and do not wait for a dead worker
        if time.monotonic() - self._ready_at >= self.steady_s:
            self._in_sequence = 0
        failures = 0
        while not stopped():
            delay_s = self.delays_s[min(self._in_sequence, len(self.delays_s) - 1)]
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
                if failures >= self.max_failed_restarts:
                    raise
                detail = f"the restart failed: {exc}"
                continue
            if not stopped():
                self.server.note(f"the server is ready again after {time.monotonic() - began:.1f} s")
                self._started_watch()
            return


def _slept(seconds: float, stopped: Callable[[], bool]) -> bool:
    """Sleep, and return whether ``stopped`` returned True in the meantime."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not stopped():
        time.sleep(_POLL_S)
    return stopped()


def probe_of_model(http_url: str, model: str) -> Probe | None:
    """Make the probe of a model from the configuration that the server reports.

    None for an ensemble, which does not compute itself, and for a model with an input without a known example.
    Errors: ServerError when the server reports no configuration.
    """
    try:
        config = json.loads(text_from_url(f"{http_url}/v2/models/{model}/config", timeout_s=_CONFIG_S))
    except (OSError, ValueError, http.client.HTTPException) as exc:
        raise ServerError(f"{model}: the server reports no configuration: {exc}") from exc
    if "ensemble_scheduling" in config:
        return None
    inputs, tensors = [], []
    for entry in config.get("input", []):
        kind = str(entry["data_type"]).removeprefix("TYPE_").replace("STRING", "BYTES")
        shape = [max(1, int(size)) for size in entry["dims"]]  # -1 stands for any size
        elements = math.prod(shape)
        if kind == "BYTES":
            data = _image() * elements
        elif kind in _BYTES:
            data = bytes(_BYTES[kind] * elements)
        else:
            return None
        batch = [1] if int(config.get("max_batch_size", 0)) else []
        parameters = {"binary_data_size": len(data)}
        inputs.append({"name": entry["name"], "shape": batch + shape, "datatype": kind, "parameters": parameters})
        tensors.append(data)
    outputs = [{"name": entry["name"], "parameters": {"binary_data": True}} for entry in config.get("output", [])]
    header = json.dumps({"id": PROBE_ID, "inputs": inputs, "outputs": outputs}).encode()
    return Probe(model=model, body=header + b"".join(tensors), json_bytes=len(header))


def _image() -> bytes:
    """Return a grey PNG as an element of a BYTES tensor: its length, then its bytes.

    It has more pixels than the preprocessing model decodes itself, so a probe also shows that large images work.
    """
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (1025, 1024), (128, 128, 128)).save(file, "PNG")
    return struct.pack("<I", file.tell()) + file.getvalue()


def ask(host: str, port: int, probe: Probe, timeout_s: float) -> Answer:
    """Send a probe over a new connection, and wait up to ``timeout_s`` seconds for the answer."""
    started = time.monotonic()
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        headers = {"Inference-Header-Content-Length": str(probe.json_bytes)}
        connection.request("POST", f"/v2/models/{probe.model}/infer", probe.body, headers)
        response = connection.getresponse()
        content = response.read()
    except TimeoutError:
        return Answer(result="late", detail=f"no answer within {timeout_s:.1f} s", seconds=timeout_s)
    except (OSError, http.client.HTTPException) as exc:
        return Answer(result="unreachable", detail=str(exc) or type(exc).__name__, seconds=time.monotonic() - started)
    finally:
        connection.close()
    seconds = time.monotonic() - started
    if response.status == 200:
        return Answer(result="answered", seconds=seconds)
    text = content.decode(errors="replace")[:200]
    return Answer(result="refused", detail=f"status {response.status}: {text}", seconds=seconds)
