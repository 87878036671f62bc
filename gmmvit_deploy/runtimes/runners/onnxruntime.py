"""Run a graph of the bundle in ONNX Runtime, on the CPU, or on a GPU with the provider for CUDA or for TensorRT."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.bundle.variants import how_to_convert, open_variant
from gmmvit_deploy.errors import BundleError, OutputError, RunnerUnavailableError
from gmmvit_deploy.files.leftovers import temporary_folder
from gmmvit_deploy.graphs.weights import write_graph
from gmmvit_deploy.inference.precision import ONNXRUNTIME_PRECISIONS
from gmmvit_deploy.runtimes.programs.onnxruntime import program_from_onnx, require_onnxruntime
from gmmvit_deploy.runtimes.programs.onnxruntime_providers import (
    CUDA,
    TENSORRT,
    BoundProgram,
    installed_tensorrt,
    require_provider,
    session_on_providers,
)
from gmmvit_deploy.runtimes.runners.inspection import inspectable_in_onnxruntime, stand_in
from gmmvit_deploy.runtimes.runners.runner import Inspection, Runner

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

    from gmmvit_deploy.bundle.artifacts import Bundle
    from gmmvit_deploy.bundle.variants import Variant
    from gmmvit_deploy.runtimes.runners.runner import Device

CUDA_OPTIONS = {"device_id": "0", "use_tf32": "0"}  # with TF32, a float32 graph has the accuracy of 10 bits
_OPTIMUM = 8


class _SessionRunner(Runner):
    """Runs a graph of a bundle with a program in ONNX Runtime.  Abstract."""

    runtime = "ONNX Runtime"
    graph: Variant
    _program: Any

    def _run(self, batch: NDArray[Any]) -> NDArray[Any]:
        logits: NDArray[Any] = self._computed(self._program.run, batch)
        return logits

    def _run_all(self, batch: NDArray[Any]) -> Sequence[NDArray[Any]]:
        answers: Sequence[NDArray[Any]] = self._computed(self._program.answers, batch)
        return answers

    def _computed(self, run: Callable[[NDArray[Any]], Any], batch: NDArray[Any]) -> Any:
        try:
            return run(batch)
        # ONNX Runtime raises a dozen unrelated exception classes, for example for a tensor of a terabyte.
        except Exception as exc:
            raise BundleError(f"{self.graph.path}: ONNX Runtime cannot compute this graph: {exc}") from exc


class OnnxRuntimeRunner(_SessionRunner):
    """Runs ``model.onnx`` of a bundle, or the bundle's graph in another precision."""

    name = "onnxruntime"

    def __init__(self, bundle: Bundle, *, variant: Variant | None = None, threads: int = 0) -> None:
        """Load a graph.

        variant: None loads the float32 graph.  threads: 0 uses a thread per core.
        Errors: RunnerUnavailableError for a precision, or a form of int8, that ONNX Runtime does not run on a CPU.
        BundleError when ONNX Runtime cannot load the graph.
        """
        super().__init__(bundle)
        self.graph = variant or open_variant(bundle, "fp32")
        self.precision, self.form = self.graph.precision, self.graph.form
        if self.precision not in ONNXRUNTIME_PRECISIONS:
            raise RunnerUnavailableError(
                f"runner {self.name}: ONNX Runtime computes in {', '.join(ONNXRUNTIME_PRECISIONS)} on a CPU, "
                f"not in {self.precision}"
            )
        if self.graph.only_openvino:
            raise RunnerUnavailableError(
                f"runner {self.name}: OpenVINO alone quantises activations of this int8 graph, while it runs",
                hint=f"use the runner openvino, or {how_to_convert(bundle, self.precision)}",
            )
        self._program = program_from_onnx(self.graph.path, threads=threads)

    @property
    def settings(self) -> dict[str, str]:
        return {"threads": str(self._program.threads), "rows at once on a core": str(self._program.chunk)}

    def _program_provenance(self) -> dict[str, str]:
        return {"graph": self.graph.path.name, "graph SHA-256": self.graph.sha256}

    def inspectable(self) -> Inspection:
        """Return the graph that runs."""
        import onnx_ir as ir

        return Inspection(inspectable_in_onnxruntime(self.graph.path.name, ir.load(self.graph.path)), "")


class OnnxRuntimeGpuRunner(_SessionRunner):
    """Runs a graph of a bundle in ONNX Runtime on named providers, never on the CPU instead.

    The report states the provider of each node. Inputs and outputs keep their memory on the GPU (I/O binding).
    """

    def __init__(
        self,
        bundle: Bundle,
        variant: Variant,
        *,
        name: str,
        providers: Mapping[str, Mapping[str, str]],
        settings: Mapping[str, str],
        device: Device = "gpu",
    ) -> None:
        """Load a graph.

        providers: provider → options; of several providers, the first that supports a node runs the node.
        settings: name → value of the settings that affect the speed.
        Errors: as `session_on_providers`.
        """
        super().__init__(bundle)
        self.name, self.device, self.graph, self.precision = name, device, variant, variant.precision
        self._providers, self._settings = providers, settings
        session, self.placement = session_on_providers(variant.path, f"runner {self.label}: {variant.path}", providers)
        self._program = BoundProgram(session, memory="cuda" if device == "gpu" else "cpu")

    @property
    def settings(self) -> dict[str, str]:
        return {"I/O binding": "on", **self._settings, **self.placement.to_text()}

    def _program_provenance(self) -> dict[str, str]:
        return {
            "graph": self.graph.path.name,
            "graph SHA-256": self.graph.sha256,
            "ONNX Runtime": require_onnxruntime(),
        }

    def inspectable(self) -> Inspection:
        """Return the graph that runs, on the same provider. TensorRT would compile a graph with more outputs anew."""
        import onnx_ir as ir

        if TENSORRT in self._providers:
            return stand_in(self.graph, f"{self.name} cannot be inspected")
        name = f"{self.graph.path.name} on {next(iter(self._providers))}"
        return Inspection(
            inspectable_in_onnxruntime(name, ir.load(self.graph.path), partial(_session, providers=self._providers)),
            "",
        )

    def close(self) -> None:
        """Release the GPU's memory."""
        self._program = None


def _session(model: ir.Model, name: str, *, providers: Mapping[str, Mapping[str, str]]) -> Any:
    with temporary_folder("graph") as folder:
        write_graph(model, folder / "model.onnx")
        return session_on_providers(folder / "model.onnx", name, providers)[0]


def cuda_runner(bundle: Bundle, variant: Variant) -> OnnxRuntimeGpuRunner:
    """Open the runner ``onnxruntime-cuda``.  Errors: as `require_provider` and `session_on_providers`."""
    require_provider(CUDA)
    return OnnxRuntimeGpuRunner(
        bundle, variant, name="onnxruntime-cuda", providers={CUDA: CUDA_OPTIONS}, settings={"TF32": "off"}
    )


def tensorrt_runner(bundle: Bundle, variant: Variant) -> OnnxRuntimeGpuRunner:
    """Open the runner ``onnxruntime-tensorrt``; CUDA runs the nodes that TensorRT does not support.

    The first run on a machine builds the engines, and stores them in the bundle's folder ``engines``.
    Errors: as `cuda_runner`.  OutputError when the folder of the engines cannot be written.
    """
    require_provider(TENSORRT)
    folder = engine_cache(bundle, variant)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise OutputError(
            f"{folder}: the engines of onnxruntime-tensorrt cannot be stored: {exc.strerror}",
            hint="copy the bundle to a folder that you may write to",
        ) from exc
    # TensorRT's own switch; ONNX Runtime has no option for TF32 in engines.
    tf32 = "off" if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0" else "on, the default of TensorRT"
    return OnnxRuntimeGpuRunner(
        bundle,
        variant,
        name="onnxruntime-tensorrt",
        providers={TENSORRT: tensorrt_options(bundle, folder), CUDA: CUDA_OPTIONS},
        settings={"TF32": tf32, "TensorRT": installed_tensorrt()[1] or "of the system", "engine cache": folder.name},
    )


def tensorrt_options(bundle: Bundle, folder: Path) -> dict[str, str]:
    """Return the options of the provider: the engine cache, and an optimisation profile for all batches of the bundle.

    No option permits a precision, so that TensorRT computes in the data types that the graph states.
    """
    tensor, max_batch = bundle.manifest.input_kind, bundle.manifest.max_batch
    sizes = {"min": 1, "opt": min(_OPTIMUM, max_batch), "max": max_batch}
    return {
        "device_id": "0",
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(folder),
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(folder),
        **{
            f"trt_profile_{which}_shapes": f"{tensor}:{'x'.join(map(str, (batch, *bundle.input_shape)))}"
            for which, batch in sizes.items()
        },
    }


def engine_cache(bundle: Bundle, variant: Variant) -> Path:
    """Return the folder of the engines that ONNX Runtime builds of a graph.

    ONNX Runtime finds an engine by the names in the graph, not by the weights, and would run the engine of another
    network of the same architecture; the folder's name therefore has the hash of the graph.
    """
    versions = f"{require_onnxruntime().rpartition(' ')[2]}-{installed_tensorrt()[1] or 'system'}"
    return bundle.path / "engines" / f"onnxruntime-tensorrt-{variant.precision}-{variant.sha256[:16]}-{versions}"
