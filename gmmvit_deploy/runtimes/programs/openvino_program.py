"""Run a network in OpenVINO on the CPU.

A batch is divided into chunks of at most `CHUNK` rows, or of another size that was measured. The data of a chunk stays
in a core's cache, and each core runs its own chunks. The
graph is compiled for each chunk size, because OpenVINO fuses more operators in a graph with static shapes.

``gmmvit repository`` copies this file into the folder of a served model, so this file imports only modules that are
copied with it.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, Literal

import numpy as np

# A relative import also works in the folder of a served model, where the package has another name.
from .cores import allowed_processors, cores

__all__ = ["CHUNK", "Hint", "OpenVinoProgram", "UnusedKernelsError"]

Hint = Literal["f32", "bf16"]
CHUNK = 16
"""The maximum number of rows in a chunk, unless the caller gives another size."""
_DYNAMIC = "DYNAMIC_QUANTIZATION_GROUP_SIZE"


class UnusedKernelsError(Exception):
    """Our kernels were requested, but replace no operator of the graph.  The message gives the reasons."""


class OpenVinoProgram:
    """A network that ``run(batch)`` computes.  Several threads may call ``run``; the calls run in sequence.

    hint: the type in which OpenVINO computes. Without a hint, OpenVINO would choose bf16 on every CPU with bf16, even
    for a float32 graph.
    threads: the number of cores to use; 0 uses every core that this process may use.
    kernels: our kernels, from `kernels_from`; None uses OpenVINO's built-in operators only.
    """

    def __init__(self, graph: Any, *, hint: Hint, threads: int = 0, chunk: int = 0, kernels: Any = None) -> None:
        """Compile a graph.

        graph: the path of an ONNX file, or the ``openvino.Model`` that was read from such a file, which is not changed.
        chunk: the maximum number of rows in a chunk, a power of two; 0 uses `CHUNK`.
        Errors: ImportError without OpenVINO.
        UnusedKernelsError before the graph is compiled, when ``kernels`` replace no operator of the graph.
        RuntimeError when OpenVINO cannot read or compile the graph, or computes in another type than ``hint``.
        """
        import openvino

        self._openvino = openvino
        self._core = openvino.Core()
        if hint == "bf16" and "BF16" not in self._core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise RuntimeError("this CPU has no bf16")
        self._small = graph.clone() if isinstance(graph, openvino.Model) else self._core.read_model(graph)
        self.quantization = _quantization(self._small)
        """OpenVINO's settings for activations that it quantises while it runs, from the metadata of the graph."""
        self._hint = hint
        self.threads = threads or cores()
        self.chunk = chunk or CHUNK
        self.attentions = kernels.describe_attention(self._small) if kernels else ""
        """How many attentions our kernel replaces, and the reasons for all others; empty without our kernels."""
        self.fused_attentions = kernels.fuse_attention(self._small, hint=hint) if kernels else 0
        self._whole = self._small.clone()  # for full chunks, which usually have enough rows for our norms to be faster
        self.fused_norms = kernels.fuse_norms(self._whole) if kernels else 0
        if kernels and not self.fused_attentions + self.fused_norms:
            raise UnusedKernelsError(kernels.unused(self.attentions))
        self._requests: dict[tuple[int, int], list[Any]] = {}
        self._kernels: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._prepared(1, 1)  # compiled now, so that a graph that cannot be compiled fails here

    @property
    def kernels(self) -> dict[str, int]:
        """Name of a kernel → number of operators that the kernel computes, as OpenVINO reports them.

        Only matrix products and operators of ours are counted.
        """
        return dict(self._kernels)

    def model(self, rows: int) -> Any:
        """Return the ``openvino.Model`` for chunks of ``rows`` rows, with our operations.  Do not change the model."""
        return self._whole if rows == self.chunk else self._small

    def prepare(self, most: int) -> None:
        """Compile the graph for all batches of up to ``most`` rows now, so that no request waits for a compilation."""
        with self._lock:
            for size in (1 << power for power in range(min(self.chunk, most).bit_length())):
                self._prepared(size, 1)
            for streams in {min(self.threads, whole) for whole in range(1, most // self.chunk + 1)}:
                self._prepared(self.chunk, streams)

    def run(self, batch: Any) -> Any:
        """Return the first output, float32 (B, C), for a batch of the graph's input (B, …)."""
        return self._run(batch, 1)[0]

    def answers(self, batch: Any) -> list[Any]:
        """Return all outputs, each float32 (B, …), for a batch of the graph's input (B, …)."""
        return self._run(batch, len(self._small.outputs))

    def _run(self, batch: Any, outputs: int) -> list[Any]:
        with self._lock:
            starts, streams = self._cut(len(batch))
            answers: list[Any] = [None] * len(starts)
            waiting: list[tuple[Any, int, Any]] = []
            used: Counter[int] = Counter()
            for index, (start, size) in enumerate(starts):
                requests = self._prepared(size, streams if size == self.chunk else 1)
                if used[size] >= len(requests):
                    self._collect(waiting.pop(0), answers, outputs)  # the oldest request: the next chunk uses it again
                request = requests[used[size] % len(requests)]
                used[size] += 1
                chunk = np.ascontiguousarray(batch[start : start + size])
                request.start_async({0: chunk}, share_inputs=True)
                waiting.append((request, index, chunk))  # the request reads the memory of the chunk until it ends
            for pending in waiting:
                self._collect(pending, answers, outputs)
        return [np.concatenate(rows) if len(rows) > 1 else rows[0] for rows in zip(*answers, strict=True)]

    def _cut(self, rows: int) -> tuple[list[tuple[int, int]], int]:
        """Return ([(start, size) of each chunk], number of full chunks that run at once).

        Sizes are powers of two up to the chunk.
        """
        whole = rows // self.chunk
        streams = max(1, min(self.threads, whole))
        starts = [(index * self.chunk, self.chunk) for index in range(whole)]
        start = whole * self.chunk
        while start < rows:
            size = 1 << ((rows - start).bit_length() - 1)
            starts.append((start, size))
            start += size
        return starts, streams

    def _collect(self, pending: tuple[Any, int, Any], answers: list[Any], outputs: int) -> None:
        request, index, _ = pending
        request.wait()
        answers[index] = [request.get_output_tensor(output).data.copy() for output in range(outputs)]

    def _prepared(self, size: int, streams: int) -> list[Any]:
        """Return the inference requests for chunks of this size, compiled on first use."""
        if (size, streams) not in self._requests:
            model = self.model(size).clone()
            shape = model.inputs[0].partial_shape
            shape[0] = size
            model.reshape(shape)
            settings = self.settings(model, streams)
            compiled = self._core.compile_model(model, "CPU", settings)
            self._require_hint(compiled)
            self._kernels = _kernels(compiled)
            self._requests[size, streams] = [compiled.create_infer_request() for _ in range(2 * streams)]
        return self._requests[size, streams]

    def settings(self, model: Any, streams: int) -> dict[str, Any]:
        """Return OpenVINO's settings for a model of `model` with a fixed batch, of which ``streams`` run at once."""
        settings: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": self._hint,
            "NUM_STREAMS": str(streams),
            "INFERENCE_NUM_THREADS": str(self.threads),
            # If they were pinned, two programs with a thread each would share the first core.
            "ENABLE_CPU_PINNING": self.threads == len(allowed_processors()),
            **self.quantization,
        }
        # Snippets, the kernels that OpenVINO generates, are slower than its other kernels for a single row in bf16.
        # Without our kernels, they compute the attentions.
        alone = model.inputs[0].shape[0] == 1 and self.fused_attentions > 0
        if self._hint == "bf16" and (alone or _attends_with_four_queries(model)):
            settings["SNIPPETS_MODE"] = "DISABLE"
        return settings

    def _require_hint(self, compiled: Any) -> None:
        types = {"f32": self._openvino.Type.f32, "bf16": self._openvino.Type.bf16}
        actual = compiled.get_property("INFERENCE_PRECISION_HINT")
        if actual != types[self._hint]:
            raise RuntimeError(f"expected OpenVINO to compute in {self._hint}, got {actual}")


def _quantization(model: Any) -> dict[str, str]:
    note = ["framework", _DYNAMIC]  # where OpenVINO keeps the metadata of an ONNX graph
    return {_DYNAMIC: model.get_rt_info(note).astype(str)} if model.has_rt_info(note) else {}


def _attends_with_four_queries(model: Any) -> bool:
    """Return True if the model has a softmax over the keys of exactly four query tokens.

    OpenVINO compiles an attention into a single generated kernel, a snippet. For four query tokens, the snippet
    computes wrong weights in bf16 (seen in OpenVINO 2026.4 on a CPU with AVX-512 BF16), and OpenVINO reports no error.
    With snippets disabled, OpenVINO computes the attention with separate matrix products, whose results are right.
    model: an ``openvino.Model`` with a fixed batch.
    """
    for node in model.get_ops():
        if node.get_type_name() == "Softmax":
            shape = node.get_output_partial_shape(0)
            if len(shape) >= 3 and str(shape[-2]) == "4":
                return True
    return False


def _kernels(compiled: Any) -> Counter[str]:
    counts: Counter[str] = Counter()
    for node in compiled.get_runtime_model().get_ordered_ops():
        notes = node.get_rt_info()
        kind, kernel = (notes[key].astype(str) for key in ("layerType", "primitiveType"))
        if kind in ("FullyConnected", "MatMul", "Subgraph", "Reference"):
            counts[f"{kind} {kernel}"] += 1
    return counts
