"""A network in ONNX Runtime on the CPU.  Imports nothing of ours: a server's model brings this very file along.

A batch with a row for every core is cut into chunks of at most `ROWS_A_CORE` rows, which stay in a core's cache, and
each core takes chunks of its own: no operator waits for another core (`benchmarks/settings/cpu_settings.py` is the
measurement). A smaller batch is run at once, its operators shared by all cores.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["ROWS_A_CORE", "OnnxRuntimeProgram", "session_options", "why_not"]

ROWS_A_CORE = 4
OUTPUT = "logits"
_SESSION_ENTRIES = {"session.intra_op.spin_duration_us": "200"}
"""After its last operator a thread looks for more work so long, and then sleeps: long enough for the gaps within an
image. By default it is some 40 ms, taken from whatever else wants that core (`benchmarks/settings/spinning.py`)."""


def why_not(library: Path) -> str:
    """Why the attention kernel of this library, onnxruntime_operations.c, cannot run here; empty where it can."""
    try:
        support = ctypes.CDLL(str(library)).masked_attention_support()
    except OSError as exc:
        return f"{library.name} cannot be loaded: {exc}"
    return "" if support else "this processor has no AVX-512"


def session_options(threads: int | None, library: Path | None) -> Any:
    """``onnxruntime.SessionOptions``.

    threads: of one operator; None leaves it to ONNX Runtime (one a core).  library: that has our attention; or None.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors; warnings at load are about optimisations, not answers
    if threads is not None:
        options.intra_op_num_threads = threads
    for entry in _SESSION_ENTRIES.items():
        options.add_session_config_entry(*entry)
    if library is not None:
        options.register_custom_ops_library(str(library))
    return options


class OnnxRuntimeProgram:
    """``run(batch) -> logits``; may be called from several threads."""

    def __init__(self, open_session: Callable[[int], Any], *, threads: int = 0) -> None:
        """open_session: threads of one operator → an ``InferenceSession``.  threads: 0 is one a core.

        Errors: what ``open_session`` raises.
        """
        self.threads = threads or len(os.sched_getaffinity(0))
        self._open = open_session
        self._shared = open_session(self.threads)  # what cannot be loaded shall fail here
        self._input = self._shared.get_inputs()[0].name
        self._workers: tuple[Any, ThreadPoolExecutor] | None = None
        self._lock = threading.Lock()

    def prepare(self, most: int) -> None:
        """Load now what batches up to ``most`` need, so that no request has to wait for it."""
        if most >= self.threads > 1:
            self._made_workers()

    def run(self, batch: Any) -> Any:
        """What the graph takes (B, …) → float32 (B, C)."""
        if len(batch) < self.threads:
            return self._logits(self._shared, batch)
        # As many chunks for each core, so that none idles at the end.
        each = -(-len(batch) // (ROWS_A_CORE * self.threads))
        chunks = np.array_split(batch, min(len(batch), each * self.threads))
        if self.threads == 1:
            return np.concatenate([self._logits(self._shared, chunk) for chunk in chunks])
        session, pool = self._made_workers()
        return np.concatenate(list(pool.map(lambda chunk: self._logits(session, chunk), chunks)))

    def _logits(self, session: Any, batch: Any) -> Any:
        return session.run([OUTPUT], {self._input: batch})[0]

    def _made_workers(self) -> tuple[Any, ThreadPoolExecutor]:
        """A session whose operators run on one thread, and a thread for every core; made when first wanted."""
        with self._lock:
            if self._workers is None:
                session = self._open(1)
                self._workers = session, ThreadPoolExecutor(self.threads, thread_name_prefix="onnxruntime")
            return self._workers
