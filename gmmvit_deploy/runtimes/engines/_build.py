"""Build a plan, the file that TensorRT loads, in a separate process.

This file is a program with a single argument, the path of a request file (`builder`). It prints the builder's progress
to stdout, as a JSON object per line. The results are files: the plan, the builder's log, ``result.json``, and the list
of layers for each target, the compute capability to build for. SIGTERM stops the builder at its next step.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorrt as trt


def main(request_path: Path) -> None:
    request: dict[str, Any] = json.loads(request_path.read_text())
    folder = request_path.parent
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = importlib.import_module(request["library"])
    with (folder / "build.log").open("w", encoding="utf-8") as log:
        result = _build_all(library, request, folder, log)
    (folder / "result.json").write_text(json.dumps(result))


def _build_all(library: Any, request: dict[str, Any], folder: Path, log: Any) -> dict[str, Any]:
    """Build the plan and list its layers; with several targets, also those of a plan for each, because they differ."""
    logger = logger_class(library)(log)
    monitor = monitor_class(library)()
    signal.signal(signal.SIGTERM, lambda *_: monitor.stop())
    targets: list[str] = request["capabilities"]
    start = time.monotonic()
    plan, layers = _build_plan(library, logger, monitor, request, targets)
    seconds = time.monotonic() - start
    if plan is None:
        return {"errors": logger.errors, "stopped": monitor.stopped}
    (folder / "model.plan").write_bytes(plan)
    listed = {"+".join(targets): layers}
    if len(targets) > 1:
        listed = {target: _build_plan(library, logger, monitor, request, [target])[1] for target in targets}
    for number, text in enumerate(listed.values()):
        (folder / f"layers.{number}.txt").write_text(text, encoding="utf-8")
    return {"errors": [], "stopped": monitor.stopped, "seconds": seconds, "listed": list(listed)}


def _build_plan(
    library: Any, logger: Any, monitor: Any, request: dict[str, Any], targets: list[str]
) -> tuple[bytes | None, str]:
    logger.layers = ""
    builder: trt.Builder = library.Builder(logger)
    # TensorRT 11 has no flag STRONGLY_TYPED, because every network of TensorRT 11 is strongly typed.
    strongly = getattr(library.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network: trt.INetworkDefinition = builder.create_network(0 if strongly is None else 1 << int(strongly))
    parser: trt.OnnxParser = library.OnnxParser(network, logger)
    if not parser.parse_from_file(request["onnx"]):  # also reads weights beside the graph
        errors = (parser.get_error(index) for index in range(parser.num_errors))
        logger.errors += [f"{error.node_name() or 'the graph'}: {error.desc()}" for error in errors]
        return None, ""
    config = configured(library, builder, request, targets)
    config.progress_monitor = monitor
    plan: trt.IHostMemory | None = builder.build_serialized_network(network, config)
    if plan is None:
        return None, ""
    if request["timing_cache"]:
        cache: trt.ITimingCache = config.get_timing_cache()
        Path(request["timing_cache_out"]).write_bytes(bytes(cache.serialize()))
    data = bytes(plan)
    return data, logger.layers or inspected(library, logger, data)


def configured(library: Any, builder: trt.Builder, request: dict[str, Any], targets: list[str]) -> trt.IBuilderConfig:
    config: trt.IBuilderConfig = builder.create_builder_config()
    config.profiling_verbosity = library.ProfilingVerbosity.DETAILED  # otherwise the layers are listed without types
    if targets:
        config.num_compute_capabilities = len(targets)
        for index, target in enumerate(targets):
            capability = getattr(library.ComputeCapability, f"SM{target.replace('.', '')}")
            config.set_compute_capability(capability, index)
    for batches in request["profiles"]:
        profile: trt.IOptimizationProfile = builder.create_optimization_profile()
        shapes = [(batch, *request["shape"]) for batch in batches]
        profile.set_shape(request["tensor"], *shapes)
        config.add_optimization_profile(profile)
    if request["tf32"]:
        config.set_flag(library.BuilderFlag.TF32)
    else:
        # By default TensorRT uses TF32, which drops 13 bits of the inputs of float32 matrix products.
        config.clear_flag(library.BuilderFlag.TF32)
    if request["version_compatible"]:
        config.set_flag(library.BuilderFlag.VERSION_COMPATIBLE)
    levels = {"ampere+": "AMPERE_PLUS", "same-cc": "SAME_COMPUTE_CAPABILITY"}
    if request["hardware_compatible"] in levels:
        level = getattr(library.HardwareCompatibilityLevel, levels[request["hardware_compatible"]])
        config.hardware_compatibility_level = level
    if request["optimization_level"] is not None:
        config.builder_optimization_level = request["optimization_level"]
    if request["workspace_mib"] is not None:
        config.set_memory_pool_limit(library.MemoryPoolType.WORKSPACE, request["workspace_mib"] << 20)
    if request["timing_cache"]:
        path = Path(request["timing_cache"])
        cache: trt.ITimingCache = config.create_timing_cache(path.read_bytes() if path.exists() else b"")
        config.set_timing_cache(cache, False)
    return config


def inspected(library: Any, logger: Any, plan: bytes) -> str:
    """Return the text in which TensorRT's engine inspector lists the layers; empty if the plan does not load.

    A plan loads only on a machine with a GPU that can run the plan.
    """
    runtime: trt.Runtime = library.Runtime(logger)
    engine: trt.ICudaEngine | None = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        return ""
    inspector: trt.EngineInspector = engine.create_engine_inspector()
    return str(inspector.get_engine_information(library.LayerInformationFormat.ONELINE))


def logger_class(library: Any) -> Any:
    """Return a class that keeps the errors and the list of layers, and writes all messages to a file, if it has one."""

    class Logger(library.ILogger):  # type: ignore[misc]
        def __init__(self, file: Any = None) -> None:
            library.ILogger.__init__(self)
            self.file = file
            self.errors: list[str] = []
            self.layers = ""

        def log(self, severity: Any, msg: str) -> None:
            if self.file is not None:
                self.file.write(f"[{severity.name}] {msg}\n")
            if severity.value <= library.ILogger.Severity.ERROR.value:
                self.errors.append(msg)
            elif msg.startswith("Layers:"):
                self.layers = msg

    return Logger


def monitor_class(library: Any) -> Any:
    """Return a progress monitor class that prints phases and the steps of outermost ones; ``stop`` ends the build."""

    class Monitor(library.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            library.IProgressMonitor.__init__(self)
            self.stopped = False
            self.steps: dict[str, int] = {}

        def stop(self) -> None:
            self.stopped = True

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self.steps[phase_name] = num_steps
            _emit(phase=phase_name, outermost=parent_phase is None, steps=num_steps)

        def phase_finish(self, phase_name: str) -> None:
            steps = self.steps.pop(phase_name, None)
            if steps is not None:
                _emit(done=steps, of=steps)  # the builder may end a phase early, without its last steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self.steps:
                _emit(done=step + 1, of=self.steps[phase_name])
            return not self.stopped

    return Monitor


def _emit(**event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the waiting parent handles Ctrl-C and sends SIGTERM
    main(Path(sys.argv[1]))
