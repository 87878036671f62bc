"""Options of a Triton repository."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast, get_args

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.precision import ONNXRUNTIME_PRECISIONS, OPENVINO_PRECISIONS, Precision, precision_from
from gmmvit_deploy.runtimes.programs.openvino import why_no_openvino
from gmmvit_deploy.serving.names import ACCELERATORS, DEFAULT_REQUEST_PIXELS, Backend, CpuKernels, Runtime

__all__ = ["RepositoryOptions", "usual_runtime"]

_AUTO = cast("Runtime", "auto")
_CHUNKS = tuple(1 << power for power in range(8))


def usual_runtime(backend: str, precision: Precision) -> Runtime:
    """Return the runtime of a network for which the user names none: OpenVINO where it can run, else ONNX Runtime."""
    return "openvino" if backend == "python" and not why_no_openvino(precision) else "onnxruntime"


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryOptions:
    """Options of a repository.

    backend: the Triton backend that runs the network.
    runtime: the runtime that the python backend uses. ``auto`` takes the choice of the bundle for this machine
    (`runners.chosen`), and with another precision or without the kernels `usual_runtime`.
    cpu_kernels: states whether the python backend uses this project's CPU kernels. ``auto`` uses the kernels if they
    are available, ``on`` fails if the kernels are not available, and ``off`` uses the runtime's built-in operators.
    precision: the precision of the network, for the backends that run an ONNX graph.
    accelerator: the provider of the server's ONNX Runtime: ``cuda`` on a GPU, without TF32, ``tensorrt`` on a GPU, with
    an engine that the server builds when it loads the model, or ``none`` on the CPU.
    name: the name of the ensemble; the names of the other models begin with this name.
    max_queue_delay_us: the maximum time that the batcher waits to fill a batch, in microseconds.
    instances: the number of copies of the network that run in parallel.
    threads: the number of threads of the runtime in an instance; 0 means a thread for each core: of the server with the
    python backend, of this machine with the onnxruntime backend, whose configuration must state a number.
    chunk: the maximum number of images that a core computes at once, a power of two; 0 means 4 in ONNX Runtime and 8
    in OpenVINO. For the python backend.
    preprocess_threads: the number of threads that decode small images, and of processes that decode large images; 0
    means as many as the server has cores.
    request_pixels: the maximum number of pixels in the images of a request, before or after resizing, whichever is
    more. The preprocessing model counts the pixels from the headers of the images, and refuses the request before it
    decodes an image. At most `WORKER_REQUESTS` times this number of pixels wait to be decoded.
    Errors: InputError when a value is invalid, or when two values contradict each other.
    """

    backend: Backend = "python"
    runtime: Runtime = _AUTO
    cpu_kernels: CpuKernels = "auto"
    precision: Precision = "fp32"
    accelerator: str = "none"
    name: str = "gmmvit"
    max_queue_delay_us: int = 0
    instances: int = 1
    threads: int = 0
    chunk: int = 0
    preprocess_threads: int = 0
    request_pixels: int = DEFAULT_REQUEST_PIXELS

    def __post_init__(self) -> None:
        if self.backend not in get_args(Backend):
            raise InputError(f"backend: expected one of {', '.join(get_args(Backend))}, got {self.backend!r}")
        precision_from(self.precision)
        if self.runtime == _AUTO and not self.leaves_runner_open:
            object.__setattr__(self, "runtime", usual_runtime(self.backend, self.precision))
        self._check_runtime()
        if self.backend == "tensorrt" and self.precision != "fp32":
            raise InputError(
                "a precision does not go with --backend tensorrt, because the engine was built in a fixed precision",
                hint="remove the precision, or type gmmvit build to build an engine in the precision that you need",
            )
        if self.accelerator not in ACCELERATORS:
            raise InputError(
                f"accelerator {self.accelerator!r} is not known", hint=f"type one of {', '.join(ACCELERATORS)}"
            )
        if self.accelerator != "none" and self.backend != "onnxruntime":
            raise InputError(
                f"--accelerator {self.accelerator} needs --backend onnxruntime, got --backend {self.backend}"
            )
        if not self.name.replace("_", "").replace("-", "").isalnum() or not self.name.isascii():
            raise InputError(f"model name: expected only letters, digits, - and _, got {self.name!r}")
        for field in ("max_queue_delay_us", "threads", "preprocess_threads"):
            if getattr(self, field) < 0:
                raise InputError(f"{field}: expected at least 0, got {getattr(self, field)}")
        if self.chunk and (self.chunk not in _CHUNKS or self.backend != "python"):
            raise InputError(
                f"chunk: expected 0, or one of {', '.join(map(str, _CHUNKS))} with --backend python, got {self.chunk} "
                f"with --backend {self.backend}"
            )
        for field in ("instances", "request_pixels"):
            if getattr(self, field) < 1:
                raise InputError(f"{field}: expected at least 1, got {getattr(self, field)}")

    @property
    def leaves_runner_open(self) -> bool:
        """Whether the bundle decides which runner computes, in which precision."""
        return (self.runtime, self.backend, self.precision, self.cpu_kernels) == (_AUTO, "python", "fp32", "auto")

    def runner(self, *, kernels: bool) -> str:
        """Return runner and precision as ``--runner`` takes them: ``openvino+kernels:fp32``.

        kernels: True if the network runs with this project's CPU kernels.
        """
        if self.accelerator != "none":
            return f"onnxruntime-{self.accelerator}:{self.precision}"
        return f"{self.runtime}{'+kernels' if kernels else ''}:{self.precision}"

    @property
    def on_gpu(self) -> bool:
        """Whether the network runs on a GPU."""
        return self.backend == "tensorrt" or self.accelerator != "none"

    def _check_runtime(self) -> None:
        if self.runtime not in get_args(Runtime) and not self.leaves_runner_open:
            raise InputError(f"runtime: expected one of {', '.join(get_args(Runtime))}, got {self.runtime!r}")
        if self.cpu_kernels not in get_args(CpuKernels):
            raise InputError(
                f"cpu_kernels: expected one of {', '.join(get_args(CpuKernels))}, got {self.cpu_kernels!r}"
            )
        if self.cpu_kernels == "on" and self.backend != "python":
            raise InputError(f"the CPU kernels need --backend python, got --backend {self.backend}")
        if self.runtime == "openvino" and self.backend != "python":
            raise InputError(f"--runner openvino needs --backend python, got --backend {self.backend}")
        if self.runtime == "openvino" and self.precision not in OPENVINO_PRECISIONS:
            raise InputError(f"OpenVINO computes in {', '.join(OPENVINO_PRECISIONS)} on a CPU, not in {self.precision}")
        if self.runtime == "onnxruntime" and not self.on_gpu:
            self._check_onnxruntime_on_a_cpu()

    def _check_onnxruntime_on_a_cpu(self) -> None:
        if self.precision not in ONNXRUNTIME_PRECISIONS:
            raise InputError(
                f"ONNX Runtime computes in {', '.join(ONNXRUNTIME_PRECISIONS)} on a CPU, not in {self.precision}",
                hint="for bf16, type --runner openvino:bf16; for fp8, build an engine on a GPU with "
                "gmmvit build BUNDLE --precision fp8 --flavor tensorrt, then type --backend tensorrt --engine DIR",
            )
        if self.precision == "int8" and self.backend == "onnxruntime":
            # Its products of int8 saturate on a CPU without VNNI, unless a session option prevents it, which only the
            # python backend can set (`onnxruntime_program`).
            raise InputError(
                "on a CPU, Triton's ONNX Runtime backend multiplies int8 in float32, so int8 is slower than fp32 there",
                hint="type --runner onnxruntime:int8 without --backend to multiply in int8",
            )

    @property
    def network(self) -> str:
        return f"{self.name}_network"

    @property
    def preprocess(self) -> str:
        return f"{self.name}_preprocess"

    @property
    def labels(self) -> str:
        return f"{self.name}_labels"

    @property
    def classify(self) -> str:
        return f"{self.name}_classify"
