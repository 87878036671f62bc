"""Run a network in OpenVINO on the CPU.

A core computes a chunk of at most `CHUNK` rows by itself, or of another size that was measured: no operator waits for
another core, and the data of a chunk stays in a core's cache. As many chunks run at once as there are cores. All cores
share the rows that are left over, if these are at most half as many as the cores, and a batch with less than two rows
for each core. The graph is compiled for each size, because OpenVINO fuses more operators in a graph with static shapes.
Each size has a copy of the weights, in the order in which its products read them: a large network gets fewer sizes.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from .cores import allowed_processors, cores
from .precision import Arithmetic

CHUNK = 8
"""The maximum number of rows that a core computes at once, unless the caller gives another size."""
CHUNK_OF_LARGE = 2
"""The same for a large network: with more rows, a ViT-S for 224 pixels was up to 5 % slower on two cores."""
_LARGE_WEIGHTS, _LARGE_TOKENS = 10_000_000, 128
"""A network with at least these numbers is large. With 50 tokens, 2 rows were 6 % slower than 8."""
_ROWS_A_CORE = 2
"""The minimum number of rows that a core computes by itself."""
UNUSED = "our kernel takes no attention of this graph: {}"
"""Why our kernels replace no operator of a graph, with the summary of `Kernels.fuse_attention`."""
_FIRST_CALL = threading.Lock()
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

    def __init__(self, graph: Any, *, hint: Arithmetic, threads: int = 0, chunk: int = 0, kernels: Any = None) -> None:
        """Compile a graph.

        graph: an ONNX file, or the ``openvino.Model`` that was read from it, which is not changed.
        chunk: the maximum number of rows in a chunk, a power of two; 0 uses `CHUNK`, or `CHUNK_OF_LARGE`.
        Errors: ImportError without OpenVINO.  UnusedKernelsError.
        RuntimeError when OpenVINO cannot read or compile the graph, or computes in another type than ``hint``.
        """
        import openvino

        with _FIRST_CALL:
            openvino.Type.f32.to_dtype()  # two threads that make the first calls at once hang (OpenVINO 2026.4)
        self._openvino = openvino
        self._core = openvino.Core()
        if hint == "bf16" and "BF16" not in self._core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise RuntimeError("this CPU has no bf16")
        self._small = graph.clone() if isinstance(graph, openvino.Model) else self._core.read_model(graph)
        self.quantization = _quantization(self._small)
        """OpenVINO's settings for activations that it quantises while it runs, from the metadata of the graph."""
        self._hint = hint
        self.threads = threads or cores()
        self.chunk = chunk or (CHUNK_OF_LARGE if _is_large(self._small) else CHUNK)
        fused: tuple[int, str] = kernels.fuse_attention(self._small, hint=hint) if kernels else (0, "")
        self.fused_attentions, self.attentions = fused
        """How many attentions our kernel replaces; the same with the reasons for all others, "" without our kernels."""
        self._several = self._small.clone()  # for several rows: with a single row, our norms are slower
        self.fused_norms = kernels.fuse_norms(self._several) if kernels else 0
        shared = self._several.clone()
        self.fused_products = kernels.fuse_products(shared, cores=self.threads) if kernels else 0
        self._shared = shared if self.fused_products else None
        if kernels and not self.fused_attentions + self.fused_norms:
            raise UnusedKernelsError(UNUSED.format(self.attentions))
        self._requests: dict[tuple[int, int], list[Any]] = {}
        self._kernels: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._prepared(1, 1)  # compiled now, so that a graph that cannot be compiled fails here

    @property
    def few_rows(self) -> int:
        """The number of rows from which a batch is divided into chunks; all cores share fewer rows."""
        return _ROWS_A_CORE * self.threads

    @property
    def kernels(self) -> dict[str, int]:
        """Name of a kernel → number of matrix products and of operators of ours, as OpenVINO reports them."""
        return dict(self._kernels)

    def model(self, rows: int, *, shared: bool = False) -> Any:
        """Return the ``openvino.Model`` for chunks of ``rows`` rows, with our operations.  Do not change the model.

        shared: whether all cores share the rows. They wait for each other at the end of each operator, so that our
        chains of int8 products save time; a core alone is as fast with OpenVINO's products.
        """
        if shared and self._shared is not None:
            return self._shared
        return self._several if rows > 1 else self._small

    def prepare(self, max_rows: int) -> None:
        """Compile the graph for all batches of up to ``max_rows`` rows now, so that no request waits for it."""
        sizes = [(size, 1) for size in _powers(min(max_rows, self.few_rows - 1))]
        if max_rows >= self.few_rows:
            sizes += [(size, self.threads) for size in _powers(min(self.chunk, -(-max_rows // self.threads)))]
        with self._lock, ThreadPoolExecutor(self.threads) as pool:  # OpenVINO compiles mostly in a single thread
            list(pool.map(self._prepared, *zip(*sizes, strict=True)))

    def run(self, batch: Any) -> Any:
        """Return the first output, float32 (B, C), for a batch of the graph's input (B, …)."""
        return self._run(batch, 1)[0]

    def answers(self, batch: Any) -> list[Any]:
        """Return all outputs, each float32 (B, …), for a batch of the graph's input (B, …)."""
        return self._run(batch, len(self._small.outputs))

    def _run(self, batch: Any, outputs: int) -> list[Any]:
        with self._lock:
            try:
                answers = self._answers(batch, outputs)
            except BaseException:
                self._requests.clear()  # a request that still runs cannot start again, so the next batch compiles anew
                raise
        return [np.concatenate(rows) if len(rows) > 1 else rows[0] for rows in zip(*answers, strict=True)]

    def _answers(self, batch: Any, outputs: int) -> list[list[Any]]:
        sizes, shared = self._divided(len(batch))
        answers: list[list[Any]] = []
        running: deque[Any] = deque()
        start = 0
        for number, size in enumerate(sizes):
            if len(running) == self.threads:
                answers.append(_outputs(running.popleft(), outputs))
            request = self._prepared(size, self.threads)[number % self.threads]
            running.append(request)
            request.start_async({0: np.ascontiguousarray(batch[start : start + size])}, share_inputs=True)
            start += size
        answers += [_outputs(request, outputs) for request in running]
        for size in _sizes(shared, shared):
            request = self._prepared(size, 1)[0]
            rows = np.ascontiguousarray(batch[start : start + size])
            request.infer({0: rows}, share_inputs=True, share_outputs=True)
            answers.append(_outputs(request, outputs))
            start += size
        return answers

    def _divided(self, rows: int) -> tuple[list[int], int]:
        """Return ([size of each chunk that a single core computes], number of rows after them that all cores share)."""
        if rows < self.few_rows:
            return [], rows
        each, rest = divmod(rows, self.threads)
        shared = rest if 2 * rest <= self.threads else 0
        counts = [each + (core < rest - shared) for core in range(self.threads)]
        # The largest first, so that chunks of the same size run at the same time.
        return sorted((size for count in counts for size in _sizes(count, self.chunk)), reverse=True), shared

    def _prepared(self, size: int, streams: int) -> list[Any]:
        """Return an inference request of each stream for chunks of this size, compiled on first use."""
        if (size, streams) not in self._requests:
            shared = streams == 1 and size < self.few_rows
            model = self.model(size, shared=shared).clone()
            shape = model.inputs[0].partial_shape
            shape[0] = size
            model.reshape(shape)
            compiled = self._core.compile_model(model, "CPU", self.settings(model, streams))
            self._require_hint(compiled)
            self._kernels = _kernels(compiled)
            self._requests[size, streams] = [compiled.create_infer_request() for _ in range(streams)]
        return self._requests[size, streams]

    def settings(self, model: Any, streams: int) -> dict[str, Any]:
        """Return OpenVINO's settings for a model of `model` with a fixed batch, of which ``streams`` run at once."""
        settings: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": self._hint,
            "NUM_STREAMS": str(streams),
            "INFERENCE_NUM_THREADS": str(self.threads),
            # Threads of two programs, or of two sizes, would be pinned to the same core.
            "ENABLE_CPU_PINNING": streams == 1 and self.threads == len(allowed_processors()),
            **self.quantization,
        }
        if any(node.get_type_name() == "ProductChain" for node in model.get_ops()):
            # OpenVINO's search for int8 products takes minutes in a deep graph of our operations (CaiT, OpenVINO
            # 2026.4). The products that are left are computed in float32.
            settings["LP_TRANSFORMS_MODE"] = "NO"
        # Snippets, the kernels that OpenVINO generates, are slower than its other kernels for a single row in bf16.
        # Without our kernels, they compute the attentions.
        alone = model.inputs[0].shape[0] == 1 and self.fused_attentions > 0
        if (self._hint == "bf16" and alone) or _has_as_many_queries_as_heads(model):
            settings["SNIPPETS_MODE"] = "DISABLE"
        return settings

    def _require_hint(self, compiled: Any) -> None:
        types = {"f32": self._openvino.Type.f32, "bf16": self._openvino.Type.bf16}
        actual = compiled.get_property("INFERENCE_PRECISION_HINT")
        if actual != types[self._hint]:
            raise RuntimeError(f"expected OpenVINO to compute in {self._hint}, got {actual}")


def _outputs(request: Any, count: int) -> list[Any]:
    """Wait until a request ends, and return copies of its first ``count`` outputs."""
    request.wait()
    return [request.get_output_tensor(output).data.copy() for output in range(count)]


def _sizes(rows: int, largest: int) -> Iterator[int]:
    """Yield the sizes of the chunks of some rows, the largest first: powers of two up to ``largest``."""
    while rows:
        size = min(largest, 1 << (rows.bit_length() - 1))
        yield size
        rows -= size


def _powers(largest: int) -> Iterator[int]:
    return (1 << power for power in range(largest.bit_length()))


def _quantization(model: Any) -> dict[str, str]:
    note = ["framework", _DYNAMIC]  # where OpenVINO keeps the metadata of an ONNX graph
    return {_DYNAMIC: model.get_rt_info(note).astype(str)} if model.has_rt_info(note) else {}


def _is_large(model: Any) -> bool:
    shapes: dict[str, list[Any]] = {"Constant": [], "MatMul": []}
    for node in model.get_ops():
        if node.get_type_name() in shapes:
            shapes[node.get_type_name()].append(node.get_output_partial_shape(0).get_max_shape())
    tokens = [shape[1] for shape in shapes["MatMul"] if len(shape) == 3]  # of (B, tokens, dim)
    weights = sum(math.prod(shape) for shape in shapes["Constant"])
    return weights >= _LARGE_WEIGHTS and max(tokens, default=0) >= _LARGE_TOKENS


def _has_as_many_queries_as_heads(model: Any) -> bool:
    """Return True if the model has an attention whose snippet OpenVINO may compute in the memory of its own queries.

    A snippet is a kernel that OpenVINO generates. Its output gets the memory of Q if both have the same shape, whatever
    the order of their dimensions, so that a core overwrites queries that it has not read yet (OpenVINO 2026.4;
    docs/pages/developing.md has a graph that shows it). With one head and one query, OpenVINO may refuse to compile the
    graph ("Layout rank"). With snippets disabled, the results are right.
    """
    shapes = [
        node.get_output_partial_shape(0).get_max_shape()
        for node in model.get_ops()
        if node.get_type_name() == "Softmax"
    ]
    # Of (B, heads, queries, keys). Attentions of another rank are not compiled into snippets, or keep their order.
    return any(len(shape) == 4 and shape[1] == shape[2] for shape in shapes)


def _kernels(compiled: Any) -> Counter[str]:
    counts: Counter[str] = Counter()
    for node in compiled.get_runtime_model().get_ordered_ops():
        notes = node.get_rt_info()
        kind, kernel = (notes[key].astype(str) for key in ("layerType", "primitiveType"))
        if kind in ("FullyConnected", "MatMul", "Subgraph", "Reference"):
            counts[f"{kind} {kernel}"] += 1
    return counts
