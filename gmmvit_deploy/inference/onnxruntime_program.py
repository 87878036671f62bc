"""Run a network in ONNX Runtime on the CPU.

A batch with at least a row for every core is divided into chunks of at most `ROWS_A_CORE` rows, or of a size that was
measured. The data of a chunk stays in a core's cache. Each core runs whole chunks, so that no operator waits for
another core. A smaller batch is not divided: all cores share the work of each operator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from .cores import cores, has_vnni, is_limited

ROWS_A_CORE = 4
"""The maximum number of rows in a chunk, unless the caller gives another size."""
_SPIN = {"session.intra_op.spin_duration_us": "200"}
"""After its last operator, a thread spins for this time, looking for more work, before it sleeps. 200 µs cover the
pauses between the operators of an image. ONNX Runtime's default is about 40 ms, during which other programs cannot use
the core."""
_EXACT_INT8 = {"session.x64quantprecision": "1"}
"""For CPUs without VNNI, and for CPUs whose flags are not known. Without VNNI, ONNX Runtime by default adds products of
int8 in pairs, in 16 bits, where a sum can saturate (`cores.int8_saturates`). With this setting, ONNX Runtime stores the
weights as uint8 and adds in 32 bits. With VNNI, the setting would only make an int8 network slower."""


def session_options(threads: int | None) -> Any:
    """Return ``onnxruntime.SessionOptions`` for this project's sessions.

    threads: the threads of an operator; None leaves the number to ONNX Runtime, which uses a thread per core, unless
    the quota of the cgroup allows fewer cores: ONNX Runtime does not read the quota.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only; warnings during loading concern optimisations, not results
    if threads is None and is_limited():
        threads = cores()
    if threads is not None:
        options.intra_op_num_threads = threads
    entries = _SPIN if has_vnni() else _SPIN | _EXACT_INT8
    for entry in entries.items():
        options.add_session_config_entry(*entry)
    return options


class OnnxRuntimeProgram:
    """A network that ``run(batch)`` computes.  Several threads may call ``run`` at the same time."""

    def __init__(self, open_session: Callable[[int], Any], *, threads: int = 0, chunk: int = 0) -> None:
        """Open the first session.

        open_session: number of threads of an operator → ``InferenceSession``.
        threads: 0 uses a thread per core.  chunk: the maximum number of rows in a chunk; 0 uses `ROWS_A_CORE`.
        """
        self.threads = threads or cores()
        self.chunk = chunk or ROWS_A_CORE
        self._open = open_session
        self._shared = open_session(self.threads)  # opened now, so that a graph that cannot be loaded fails here
        self._input = self._shared.get_inputs()[0].name
        self._outputs = [output.name for output in self._shared.get_outputs()]
        self._workers: tuple[Any, ThreadPoolExecutor] | None = None
        self._lock = threading.Lock()

    def prepare(self, max_rows: int) -> None:
        """Open the sessions for batches of up to ``max_rows`` rows now, so that no request waits for a session."""
        if max_rows >= self.threads > 1:
            self._made_workers()

    def run(self, batch: Any) -> Any:
        """Return the first output, float32 (B, C), for a batch of the graph's input (B, …)."""
        return self._run(batch, self._outputs[:1])[0]

    def answers(self, batch: Any) -> list[Any]:
        """Return all outputs, each float32 (B, …), for a batch of the graph's input (B, …)."""
        return self._run(batch, self._outputs)

    def _run(self, batch: Any, names: list[str]) -> list[Any]:
        if len(batch) < self.threads:
            return self._answers(self._shared, batch, names)
        # Each core gets the same number of chunks, so that no core idles at the end.
        each = -(-len(batch) // (self.chunk * self.threads))
        chunks = np.array_split(batch, min(len(batch), each * self.threads))
        if self.threads == 1:
            parts = [self._answers(self._shared, chunk, names) for chunk in chunks]
        else:
            session, pool = self._made_workers()
            parts = list(pool.map(lambda chunk: self._answers(session, chunk, names), chunks))
        return [np.concatenate(rows) for rows in zip(*parts, strict=True)]

    def _answers(self, session: Any, batch: Any, names: list[str]) -> list[Any]:
        answers: list[Any] = session.run(names, {self._input: batch})
        return answers

    def _made_workers(self) -> tuple[Any, ThreadPoolExecutor]:
        """Return (a session with single-threaded operators, a pool with a thread per core), created on first use."""
        with self._lock:
            if self._workers is None:
                session = self._open(1)
                self._workers = session, ThreadPoolExecutor(self.threads, thread_name_prefix="onnxruntime")
            return self._workers
