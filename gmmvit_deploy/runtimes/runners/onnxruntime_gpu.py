"""Run a graph of the bundle in ONNX Runtime on a GPU, with the provider for CUDA or the provider for TensorRT."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import OutputError
from gmmvit_deploy.runtimes.programs.onnxruntime_package import require_onnxruntime
from gmmvit_deploy.runtimes.programs.onnxruntime_providers import (
    CUDA,
    TENSORRT,
    BoundProgram,
    installed_tensorrt,
    require_provider,
    session_on_providers,
)
from gmmvit_deploy.runtimes.runners.inspection import inspectable_in_onnxruntime, stand_in
from gmmvit_deploy.runtimes.runners.onnxruntime import SessionRunner
from gmmvit_deploy.runtimes.runners.runner import Inspection

if TYPE_CHECKING:
    from gmmvit_deploy.bundle.artifacts import Bundle
    from gmmvit_deploy.bundle.variants import Variant
    from gmmvit_deploy.runtimes.runners.runner import Device

__all__ = ["OnnxRuntimeGpuRunner", "cuda_runner", "tensorrt_runner"]

_CUDA_OPTIONS = {"device_id": "0", "use_tf32": "0"}  # with TF32, a float32 graph has the accuracy of 10 bits
_USUAL_BATCH = 8


class OnnxRuntimeGpuRunner(SessionRunner):
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
        session, self.placement = session_on_providers(
            variant.path.read_bytes(), f"runner {self.label}: {variant.path}", providers
        )
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
        import onnx

        if TENSORRT in self._providers:
            return stand_in(self.graph, f"{self.name} cannot be inspected")
        name = f"{self.graph.path.name} on {next(iter(self._providers))}"
        return Inspection(
            inspectable_in_onnxruntime(name, onnx.load(self.graph.path), partial(_session, providers=self._providers)),
            "",
        )

    def close(self) -> None:
        """Release the GPU's memory."""
        self._program = None


def _session(graph: bytes, name: str, *, providers: Mapping[str, Mapping[str, str]]) -> Any:
    return session_on_providers(graph, name, providers)[0]


def cuda_runner(bundle: Bundle, variant: Variant) -> OnnxRuntimeGpuRunner:
    """Open the runner ``onnxruntime-cuda``.  Errors: as `require_provider` and `session_on_providers`."""
    require_provider(CUDA)
    return OnnxRuntimeGpuRunner(
        bundle, variant, name="onnxruntime-cuda", providers={CUDA: _CUDA_OPTIONS}, settings={"TF32": "off"}
    )


def tensorrt_runner(bundle: Bundle, variant: Variant) -> OnnxRuntimeGpuRunner:
    """Open the runner ``onnxruntime-tensorrt``; CUDA runs the nodes that TensorRT does not support.

    The first run on a machine builds the engines, and stores them in the bundle's folder ``engines``.
    Errors: as `require_provider` and `session_on_providers`.
    OutputError when the folder of the engines cannot be written.
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
        providers={TENSORRT: tensorrt_options(bundle, folder), CUDA: _CUDA_OPTIONS},
        settings={"TF32": tf32, "TensorRT": installed_tensorrt()[1] or "of the system", "engine cache": folder.name},
    )


def tensorrt_options(bundle: Bundle, folder: Path) -> dict[str, str]:
    """Return the options of the provider: the engine cache, and an optimisation profile for all batches of the bundle.

    No option permits a precision, so that TensorRT computes in the data types that the graph states.
    """
    tensor, most = bundle.manifest.input_kind, bundle.manifest.max_batch
    sizes = {"min": 1, "opt": min(_USUAL_BATCH, most), "max": most}
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
