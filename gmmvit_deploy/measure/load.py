"""Run MLPerf LoadGen, which sends queries to a runner and records the latency of each query.

    SingleStream   a query is a single sample; LoadGen sends the next query when the previous query is answered
    MultiStream    a query is a batch of samples; LoadGen sends the next query when the previous query is answered
    Offline        LoadGen sends all samples at once, to measure throughput
    Server         a query is a single sample; LoadGen sends queries at random times (Poisson arrivals) with a fixed
                   mean rate, and does not wait for answers

The latency of a query begins at the time for which LoadGen scheduled the query. If the runner is overloaded, the
latency therefore includes the time for which the query waits.

In Offline, in Server and for a program that needs a thread of its own, LoadGen only puts samples into a queue. An idle
thread takes up to `Work.batch` of the waiting samples, and answers them in a single call. As in a server with a queue
delay of 0, no sample waits until a batch is full.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.errors import GmmvitError
from gmmvit_deploy.extras import require
from gmmvit_deploy.files.leftovers import temporary_folder

ScenarioName = Literal["SingleStream", "MultiStream", "Offline", "Server"]
Program = Callable[[NDArray[Any]], NDArray[Any]]
"""Inputs (B, …) → logits (B, classes)."""
_SAME_SCHEDULE = 20261  # a fixed seed: LoadGen schedules the same samples for every runner
_LATENCY_BOUND_UNUSED_NS = 10**12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """The settings of a LoadGen run.

    inputs: (N, …), from which samples are drawn.  queries: in Offline, the number of samples.
    batch: the samples of a query of MultiStream; in Offline and Server, the maximum for a call of the program.
    callers: the maximum number of concurrent calls, in Offline and Server.
    rate, bound_ms: in Server, queries a second and the largest p99 latency.
    in_thread: True to call the program from a thread of its own in every scenario (`Runner.needs_own_thread`).
    """

    scenario: ScenarioName
    inputs: NDArray[Any]
    queries: int
    batch: int = 1
    callers: int = 1
    rate: float = 0.0
    bound_ms: float = 0.0
    seed: int = _SAME_SCHEDULE
    in_thread: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadRun:
    """The result of a LoadGen run.

    latencies_ms: of each query; in Offline, of each sample.
    seconds: from the scheduled time of the first query to the last answer.
    indices, outputs: the input (n,) and the logits (n, C) of each sample, in the order of the answers.
    complaints: LoadGen's errors and warnings.
    """

    latencies_ms: NDArray[Any]
    seconds: float
    indices: NDArray[Any]
    outputs: NDArray[Any]
    complaints: tuple[str, ...]

    @property
    def samples_per_second(self) -> float:
        return len(self.indices) / self.seconds


def drive(program: Program, work: Work) -> LoadRun:
    """Run LoadGen once, in performance mode.

    Errors: those of the program; GmmvitError when an answer is missing; MissingDependencyError.
    """
    loadgen = require("mlperf_loadgen", package="mlcommons-loadgen", extra="bench")
    answers = _Answers(loadgen, program, work)
    count = len(work.inputs)
    with temporary_folder("loadgen") as folder:
        logs = loadgen.LogSettings()
        logs.enable_trace = True
        logs.log_output.outdir = str(folder)
        logs.log_output.copy_summary_to_stdout = False
        # Without this path, LoadGen would read a file audit.config in the working directory.
        audit = str(folder / "no-audit.config")
        system = loadgen.ConstructSUT(answers.issue, lambda: None)
        library = loadgen.ConstructQSL(count, count, lambda indices: None, lambda indices: None)
        try:
            with ThreadPoolExecutor(work.callers) as answers.pool:
                loadgen.StartTestWithLogSettings(system, library, _settings(loadgen, work), logs, audit)
        finally:
            loadgen.DestroyQSL(library)
            loadgen.DestroySUT(system)
        if answers.failure is not None:
            raise answers.failure
        spans = _spans(folder / "mlperf_log_trace.json")
        complaints = _complaints(folder / "mlperf_log_detail.txt")
    return answers.result(spans, complaints)


def _settings(loadgen: Any, work: Work) -> Any:
    settings = loadgen.TestSettings()
    settings.scenario = getattr(loadgen.TestScenario, work.scenario)
    settings.mode = loadgen.TestMode.PerformanceOnly
    settings.min_duration_ms = 0
    settings.min_query_count = work.queries
    settings.max_query_count = work.queries if work.scenario != "Offline" else 1
    settings.multi_stream_samples_per_query = work.batch
    settings.single_stream_expected_latency_ns = settings.multi_stream_expected_latency_ns = 10**6
    # In Offline, LoadGen sends offline_expected_qps * (duration + 10 %) samples, and at least min_query_count samples.
    settings.offline_expected_qps = 1
    settings.server_target_qps = work.rate or 1.0
    settings.server_target_latency_ns = int(work.bound_ms * 1e6) or _LATENCY_BOUND_UNUSED_NS
    settings.server_target_latency_percentile = 0.99
    settings.sample_index_rng_seed = settings.schedule_rng_seed = settings.qsl_rng_seed = work.seed
    return settings


class _Answers:
    """The system under test of LoadGen: takes queries, runs the program, and keeps the program's answers."""

    def __init__(self, loadgen: Any, program: Program, work: Work) -> None:
        self._loadgen = loadgen
        self._program = program
        self._work = work
        self._lock = threading.Lock()
        self._answered: list[tuple[list[int], NDArray[Any]]] = []  # LoadGen reads the logits from this memory
        self._waiting: deque[Any] = deque()
        self.pool: ThreadPoolExecutor
        self.failure: BaseException | None = None

    def issue(self, samples: Sequence[Any]) -> None:
        """Take the samples of a query: answer them in this thread, or put them into the queue and return at once."""
        work = self._work
        if work.scenario not in ("Offline", "Server") and not work.in_thread:
            self._answer(samples)
            return
        self._waiting.extend(samples)
        for _ in range(0, len(samples), work.batch):
            self.pool.submit(self._answer_waiting)

    def _answer_waiting(self) -> None:
        with self._lock:
            taken = [self._waiting.popleft() for _ in range(min(self._work.batch, len(self._waiting)))]
        if taken:  # a call before this one may have taken the samples of several queries
            self._answer(taken)

    def _answer(self, samples: Sequence[Any]) -> None:
        indices = [sample.index for sample in samples]
        try:
            logits = np.ascontiguousarray(self._program(self._work.inputs[indices]), dtype=np.float32)
        # LoadGen would wait for ever for a missing answer. Answer with zeros; `drive` raises the error later.
        except BaseException as exc:
            self.failure = self.failure or exc
            logits = np.zeros((len(samples), 1), dtype=np.float32)
        response = self._loadgen.QuerySampleResponse
        width = logits.strides[0]
        start = logits.ctypes.data
        self._loadgen.QuerySamplesComplete(
            [response(sample.id, start + row * width, width) for row, sample in enumerate(samples)]
        )
        # LoadGen has recorded the latency at this point. The answers are checked after the run.
        self._answered.append((indices, logits))

    def result(self, spans: dict[int, tuple[int, float, float]], complaints: tuple[str, ...]) -> LoadRun:
        indices = np.concatenate([part for part, _ in self._answered])
        if len(spans) != len(indices):
            raise GmmvitError(
                f"LoadGen sent {len(indices)} samples, expected the same number in LoadGen's trace, got {len(spans)}"
            )
        by_query: dict[int, float] = {}
        for key, scheduled, answered in spans.values():
            by_query[key] = max(by_query.get(key, 0.0), answered - scheduled)
        offline = self._work.scenario == "Offline"
        latencies = [answered for *_, answered in spans.values()] if offline else list(by_query.values())
        first = min(scheduled for _, scheduled, _ in spans.values())
        last = max(answered for *_, answered in spans.values())
        return LoadRun(
            latencies_ms=np.array(latencies) / 1e6,
            seconds=(last - first) / 1e9,
            indices=indices,
            outputs=np.concatenate([logits for _, logits in self._answered]),
            complaints=complaints,
        )


def _spans(trace: Path) -> dict[int, tuple[int, float, float]]:
    """Read LoadGen's trace: number of the sample → (number of the query, scheduled time, answered time), in ns."""
    spans: dict[int, tuple[int, float, float]] = {}
    for line in trace.read_text(encoding="utf-8").splitlines():
        if not line.startswith('{"name":"Sample",') or '"ph":"b"' not in line:
            continue
        event = json.loads(line.rstrip(","))
        notes = event["args"]
        # ts is the query's scheduled time in microseconds; complete_ns is the time from ts to the answer.
        scheduled = float(event["ts"]) * 1e3
        spans[int(notes["sample_seq"])] = (int(notes["query_seq"]), scheduled, scheduled + float(notes["complete_ns"]))
    return spans


def _complaints(detail: Path) -> tuple[str, ...]:
    """Read LoadGen's errors and warnings, without its warning that a run ends at the requested number of queries."""
    complaints = []
    for line in detail.read_text(encoding="utf-8").splitlines():
        note = json.loads(line.removeprefix(":::MLLOG "))
        if (note["metadata"]["is_error"] or note["metadata"]["is_warning"]) and "Max query count" not in str(
            note["value"]
        ):
            complaints.append(f"{note['key']}: {note['value']}")
    return tuple(complaints)
