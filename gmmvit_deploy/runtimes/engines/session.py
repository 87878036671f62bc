"""Run a plan, the file that TensorRT loads, on a GPU.

    host → device → execute_async_v3 (captured once per batch size as a CUDA graph, then replayed) → host

The buffers are torch tensors, and the host buffers are pinned memory. All steps use the same CUDA stream, and the host
waits only for the final copy.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import EngineError
from gmmvit_deploy.extras import require
from gmmvit_deploy.runtimes.engines._build import logger_class
from gmmvit_deploy.runtimes.engines.flavors import FlavorName, tensorrt_library

if TYPE_CHECKING:
    import tensorrt as trt
    from numpy.typing import NDArray

_BUILD_AGAIN = "type gmmvit build on this machine to build the engine again"
_WARM_UPS = 3  # executions before a capture; the first executions allocate memory, and a capture must allocate none


@dataclass(slots=True)
class _Slot:
    """The execution context, buffers and CUDA graph for a batch size, created for the first batch of this size."""

    context: Any
    host_in: Any
    host_out: Any
    device_in: Any
    device_out: Any
    graph: Any = None  # None before the capture


class PlanSession:
    """Runs a plan on the GPU.

    tensor, dtype: of the input.  profile_of: maps a batch size to the index of the optimisation profile.
    host_code: allow the code that a version compatible plan contains to run on the host.
    Errors: MissingDependencyError when PyTorch or the flavor is not installed.
    EngineError when PyTorch sees no GPU, TensorRT does not load the plan, or the plan has not a single float32 output.
    """

    def __init__(
        self,
        flavor: FlavorName,
        plan: bytes,
        *,
        tensor: str,
        dtype: str,
        profile_of: Any,
        host_code: bool = False,
    ) -> None:
        self._torch = require("torch", package="torch", extra=flavor)
        if not self._torch.cuda.is_available():
            raise EngineError(
                "an engine runs on an NVIDIA GPU, but PyTorch sees no GPU here",
                hint="type gmmvit doctor to check the installation",
            )
        library = tensorrt_library(flavor)
        self._logger = logger_class(library)()
        runtime: trt.Runtime = library.Runtime(self._logger)
        runtime.engine_host_code_allowed = host_code
        engine: trt.ICudaEngine | None = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            reason = "; ".join(self._logger.errors[:2]) or "TensorRT gave no reason"
            raise EngineError(
                f"{flavor} {library.__version__} does not load the plan: {reason}",
                hint=_BUILD_AGAIN,
            )
        self._logits = _output_of(library, engine)
        self._runtime: Any = runtime
        self._engine: Any = engine
        self._tensor, self._dtype = tensor, dtype
        self._profile_of = profile_of
        self._stream = self._torch.cuda.Stream()
        self._slots: dict[int, _Slot] = {}

    def run(self, batch: NDArray[Any]) -> NDArray[Any]:
        """Compute float32 logits (B, C).  Errors: EngineError when TensorRT refuses the batch or the execution."""
        slot = self._slot(batch)
        slot.host_in.numpy()[...] = batch
        with self._torch.cuda.stream(self._stream):
            slot.device_in.copy_(slot.host_in, non_blocking=True)
            self._execute(slot)
            slot.host_out.copy_(slot.device_out, non_blocking=True)
        self._stream.synchronize()
        logits: NDArray[Any] = slot.host_out.numpy().copy()
        return logits

    def milliseconds(self, batch: NDArray[Any], *, repeats: int = 200) -> float:
        """Return the median time of an execution in milliseconds (CUDA events), without copies from and to the host."""
        slot = self._slot(batch)
        events = [[self._torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        with self._torch.cuda.stream(self._stream):
            for start, end in events:
                start.record(self._stream)
                self._execute(slot)
                end.record(self._stream)
        self._stream.synchronize()
        return float(statistics.median(start.elapsed_time(end) for start, end in events))

    def close(self) -> None:
        """Release the contexts, then the engine, then the runtime; TensorRT requires this order."""
        self._slots.clear()
        self._engine = self._runtime = None

    def _slot(self, batch: NDArray[Any]) -> _Slot:
        if len(batch) not in self._slots:
            self._slots[len(batch)] = self._new_slot(batch)
        return self._slots[len(batch)]

    def _new_slot(self, batch: NDArray[Any]) -> _Slot:
        torch = self._torch
        engine: trt.ICudaEngine = self._engine
        context: trt.IExecutionContext = engine.create_execution_context()
        context.set_optimization_profile_async(self._profile_of(len(batch)), self._stream.cuda_stream)
        self._stream.synchronize()
        if not context.set_input_shape(self._tensor, tuple(batch.shape)):
            raise EngineError(
                f"the engine refuses a batch of {tuple(batch.shape)}: {'; '.join(self._logger.errors[-1:])}",
                hint=_BUILD_AGAIN,
            )
        kind = torch.uint8 if self._dtype == "uint8" else torch.float32
        host_in = torch.empty(tuple(batch.shape), dtype=kind, pin_memory=True)
        shape: tuple[int, ...] = tuple(context.get_tensor_shape(self._logits))
        host_out = torch.empty(shape, dtype=torch.float32, pin_memory=True)
        slot = _Slot(context, host_in, host_out, host_in.cuda(), host_out.cuda())
        context.set_tensor_address(self._tensor, slot.device_in.data_ptr())
        context.set_tensor_address(self._logits, slot.device_out.data_ptr())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                self._execute(slot)
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._execute(slot)
        slot.graph = graph
        return slot

    def _execute(self, slot: _Slot) -> None:
        if slot.graph is not None:
            slot.graph.replay()
            return
        context: trt.IExecutionContext = slot.context
        if not context.execute_async_v3(self._stream.cuda_stream):
            raise EngineError(
                f"TensorRT refused the execution: {'; '.join(self._logger.errors[-2:]) or 'no reason given'}",
                hint=_BUILD_AGAIN,
            )


def _output_of(library: Any, engine: trt.ICudaEngine) -> str:
    """Return the name of the engine's output.  Errors: EngineError unless it has a single output, of float32."""
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    outputs: list[str] = [name for name in names if engine.get_tensor_mode(name) == library.TensorIOMode.OUTPUT]
    if len(outputs) != 1 or engine.get_tensor_dtype(outputs[0]) != library.DataType.FLOAT:
        raise EngineError(
            f"expected a single float32 output, the logits; the engine's outputs are {', '.join(outputs) or 'missing'}",
            hint=_BUILD_AGAIN,
        )
    return outputs[0]
