"""Options of a Triton repository."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.inference.precision import ONNXRUNTIME_PRECISIONS, OPENVINO_PRECISIONS, SPECS
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.runtimes.runners.names import ON_CPUS, ON_GPUS
from gmmvit_deploy.serving.names import DEFAULT_REQUEST_PIXELS, Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryOptions:
    """Options of a repository.

    backend: the Triton backend that runs the network. A runner on a GPU needs ``onnxruntime``.
    runner: what computes the network, for the backends that run an ONNX graph. None takes the choice of the bundle for
    this machine (`runners.chosen`), and with the onnxruntime backend ONNX Runtime in float32.
    name: the name of the ensemble; the names of the other models begin with this name.
    max_queue_delay_us: the maximum time that the batcher waits to fill a batch, in microseconds.
    instances: the number of copies of the network that run in parallel.
    threads: the number of threads of the runtime in an instance; 0 means a thread for each core: of the server with the
    python backend, of this machine with the onnxruntime backend, whose configuration must state a number.
    preprocess_threads: the number of threads that decode small images, and of processes that decode large images; 0
    means as many as the server has cores.
    request_pixels: the maximum number of pixels in the images of a request, before or after resizing, whichever is
    more. The preprocessing model counts the pixels from the headers of the images, and refuses the request before it
    decodes an image. At most `WORKER_REQUESTS` times this number of pixels wait to be decoded.
    Errors: InputError when a value is invalid, or when two values contradict each other.
    """

    backend: Backend = "python"
    runner: RunnerName | None = None
    name: str = "gmmvit"
    max_queue_delay_us: int = 0
    instances: int = 1
    threads: int = 0
    preprocess_threads: int = 0
    request_pixels: int = DEFAULT_REQUEST_PIXELS

    def __post_init__(self) -> None:
        if self.backend not in get_args(Backend):
            raise InputError(f"backend: expected one of {', '.join(get_args(Backend))}, got {self.backend!r}")
        if self.runner is not None:
            self._check(self.runner)
        if not self.name.replace("_", "").replace("-", "").isalnum() or not self.name.isascii():
            raise InputError(f"model name: expected only letters, digits, - and _, got {self.name!r}")
        for field in ("max_queue_delay_us", "threads", "preprocess_threads"):
            if getattr(self, field) < 0:
                raise InputError(f"{field}: expected at least 0, got {getattr(self, field)}")
        for field in ("instances", "request_pixels"):
            if getattr(self, field) < 1:
                raise InputError(f"{field}: expected at least 1, got {getattr(self, field)}")

    @property
    def accelerator(self) -> str:
        """The provider of the server's ONNX Runtime on a GPU, ``cuda`` or ``tensorrt``; "" on a CPU."""
        return self.runner.runtime.partition("-")[2] if self.runner is not None else ""

    @property
    def on_gpu(self) -> bool:
        """Whether the network runs on a GPU."""
        return self.backend == "tensorrt" or bool(self.accelerator)

    def _check(self, runner: RunnerName) -> None:
        if self.backend == "tensorrt":
            raise InputError(
                f"--runner {runner} does not go with --backend tensorrt, which runs the engine of --engine, built in a "
                "fixed precision",
                hint="remove --runner, or remove --backend and --engine",
            )
        if runner.cascade and self.backend != "python":
            raise InputError(f"--runner {runner} needs --backend python", hint="remove --backend")
        if runner.name in ON_GPUS:
            if self.backend != "onnxruntime":
                raise InputError(
                    f"--runner {runner} needs --backend onnxruntime, got --backend {self.backend}",
                    hint="type --backend onnxruntime, or remove --backend",
                )
        elif runner.name not in ON_CPUS:
            raise InputError(f"runner: expected one of {', '.join((*ON_CPUS, *ON_GPUS))}, got {runner.name!r}")
        elif runner.runtime == "openvino":
            self._check_openvino(runner)
        else:
            self._check_onnxruntime_on_a_cpu(runner)

    def _check_openvino(self, runner: RunnerName) -> None:
        if self.backend != "python":
            other = f"type --backend onnxruntime --runner onnxruntime:{runner.precision}, or "
            raise InputError(
                f"--runner {runner} needs --backend python, got --backend {self.backend}",
                hint=f"{other if runner.precision == 'fp32' else ''}remove --backend",
            )
        if runner.precision not in OPENVINO_PRECISIONS:
            raise InputError(
                f"OpenVINO computes in {', '.join(OPENVINO_PRECISIONS)} on a CPU, not in {runner.precision}"
            )

    def _check_onnxruntime_on_a_cpu(self, runner: RunnerName) -> None:
        if runner.precision not in ONNXRUNTIME_PRECISIONS:
            raise InputError(
                f"ONNX Runtime computes in {', '.join(ONNXRUNTIME_PRECISIONS)} on a CPU, not in {runner.precision}",
                hint="for bf16, type --runner openvino:bf16; for fp8, build an engine on a GPU with "
                "gmmvit build BUNDLE --precision fp8 --flavor tensorrt, then type --backend tensorrt --engine DIR",
            )
        if SPECS[runner.precision].projection == "int8" and self.backend == "onnxruntime":
            # Its products of int8 saturate on a CPU without VNNI, unless a session option prevents it, which only the
            # python backend can set (`onnxruntime_program`).
            raise InputError(
                "on a CPU, Triton's ONNX Runtime backend multiplies int8 in float32, so int8 is slower than fp32 there",
                hint="type --runner onnxruntime:int8 without --backend to multiply in int8",
            )

    @property
    def models(self) -> tuple[str, ...]:
        """The names of all models that a repository can have with these options."""
        return self.name, self.classify, self.network, self.preprocess, self.labels

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
