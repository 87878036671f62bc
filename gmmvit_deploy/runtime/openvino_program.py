"""A network in OpenVINO on the CPU.  Imports nothing of ours, so that a server's model can bring this very file along.

A batch is cut into chunks that stay in a core's cache (``CHUNK`` rows; `benchmarks/settings/cpu_settings.py` is
the measurement), several of them side by side on cores of their own. Every chunk has a size of which
a program was compiled with that shape: a graph whose shapes are known is fused further.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from typing import Any, Literal

import numpy as np

__all__ = ["CHUNK", "Hint", "OpenVinoProgram"]

Hint = Literal["f32", "bf16"]
CHUNK = 16


class OpenVinoProgram:
    """``run(batch) -> logits``; may be called from several threads, one call at a time is run.

    hint: what the products compute in.  It is never left to OpenVINO, whose own choice on a CPU that
    has bf16 is bf16, whatever the graph says.
    threads: cores to use; 0 is all that this process may run on.
    kernels: our own, as `kernels_from` gives them; None leaves all to OpenVINO.
    """

    def __init__(self, path: str, *, hint: Hint, threads: int = 0, kernels: Any = None) -> None:
        """Errors: ImportError; RuntimeError when OpenVINO cannot read or compile the graph, or computes otherwise."""
        import openvino

        self._openvino = openvino
        self._core = openvino.Core()
        if hint == "bf16" and "BF16" not in self._core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise RuntimeError("this CPU has no bf16")
        self._small = self._core.read_model(path)
        self._hint = hint
        self.threads = threads or len(os.sched_getaffinity(0))
        self.attentions = kernels.describe_attention(self._small) if kernels else ""
        """How many attentions our kernel takes, and why not the others; empty without our kernels."""
        self.fused_attentions = kernels.fuse_attention(self._small) if kernels else 0
        self._whole = self._small.clone()  # a chunk has rows enough for our norms to gain
        self.fused_norms = kernels.fuse_norms(self._whole) if kernels else 0
        self._requests: dict[tuple[int, int], list[Any]] = {}
        self._kernels: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._prepared(1, 1)  # what cannot be compiled shall fail here

    @property
    def kernels(self) -> dict[str, int]:
        """Kernel of every matrix product and fused attention → how often it is there, as OpenVINO itself tells it."""
        return dict(self._kernels)

    def model(self, rows: int) -> Any:
        """The ``openvino.Model`` that chunks of ``rows`` are run by, our operations in it; not to be changed."""
        return self._whole if rows == CHUNK else self._small

    def prepare(self, most: int) -> None:
        """Compile now for every batch up to ``most``, so that no request has to wait for it."""
        with self._lock:
            for size in (1 << power for power in range(min(CHUNK, most).bit_length())):
                self._prepared(size, 1)
            for streams in {min(self.threads, whole) for whole in range(1, most // CHUNK + 1)}:
                self._prepared(CHUNK, streams)

    def run(self, batch: Any) -> Any:
        """What the graph takes (B, …) → float32 (B, C)."""
        with self._lock:
            starts, streams = self._cut(len(batch))
            answers: list[Any] = [None] * len(starts)
            waiting: list[tuple[Any, int]] = []
            used: Counter[int] = Counter()
            for index, (start, size) in enumerate(starts):
                requests = self._prepared(size, streams if size == CHUNK else 1)
                if used[size] >= len(requests):
                    self._collect(waiting.pop(0), answers)  # the oldest, which is the one that comes round again
                request = requests[used[size] % len(requests)]
                used[size] += 1
                request.start_async({0: np.ascontiguousarray(batch[start : start + size])}, share_inputs=True)
                waiting.append((request, index))
            for one in waiting:
                self._collect(one, answers)
        return np.concatenate(answers) if len(answers) > 1 else answers[0]

    def _cut(self, rows: int) -> tuple[list[tuple[int, int]], int]:
        """[(start, size)] with sizes that are powers of two up to `CHUNK`, and how many run side by side."""
        whole = rows // CHUNK
        streams = max(1, min(self.threads, whole))
        starts = [(index * CHUNK, CHUNK) for index in range(whole)]
        start = whole * CHUNK
        while start < rows:
            size = 1 << ((rows - start).bit_length() - 1)
            starts.append((start, size))
            start += size
        return starts, streams

    def _collect(self, waiting: tuple[Any, int], answers: list[Any]) -> None:
        request, index = waiting
        request.wait()
        answers[index] = request.get_output_tensor(0).data.copy()

    def _prepared(self, size: int, streams: int) -> list[Any]:
        """Requests for chunks of this size; compiled when they are first wanted."""
        if (size, streams) not in self._requests:
            model = self.model(size).clone()
            shape = model.inputs[0].partial_shape
            shape[0] = size
            model.reshape(shape)
            settings = {
                "INFERENCE_PRECISION_HINT": self._hint,
                "NUM_STREAMS": str(streams),
                "INFERENCE_NUM_THREADS": str(self.threads),
                # Pinned, two programs of one thread each would both sit on the first core.
                "ENABLE_CPU_PINNING": self.threads == len(os.sched_getaffinity(0)),
            }
            compiled = self._core.compile_model(model, "CPU", settings)
            self._require_hint(compiled)
            self._kernels = _kernels(compiled)
            self._requests[size, streams] = [compiled.create_infer_request() for _ in range(2 * streams)]
        return self._requests[size, streams]

    def _require_hint(self, compiled: Any) -> None:
        types = {"f32": self._openvino.Type.f32, "bf16": self._openvino.Type.bf16}
        found = compiled.get_property("INFERENCE_PRECISION_HINT")
        if found != types[self._hint]:
            raise RuntimeError(f"{self._hint} was asked for; OpenVINO computes in {found}")


def _kernels(compiled: Any) -> Counter[str]:
    found: Counter[str] = Counter()
    for node in compiled.get_runtime_model().get_ordered_ops():
        notes = node.get_rt_info()
        kind, kernel = (notes[key].astype(str) for key in ("layerType", "primitiveType"))
        if kind in ("FullyConnected", "MatMul", "Subgraph", "Reference"):
            found[f"{kind} {kernel}"] += 1
    return found
