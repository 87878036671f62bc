"""Load the programs of our CPU runners with our kernels.

If our kernels are not available, the script ends with the reason. A program without our kernels is therefore never
timed under the name of a runner with kernels.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from gmmvit_deploy.bench.interleaved import Program
from gmmvit_deploy.bench.machine import cpu_features
from gmmvit_deploy.kernels.openvino_kernels import Kernels
from gmmvit_deploy.precision import Precision
from gmmvit_deploy.runtime.onnxruntime import FusedGraph, fused_graph, program_from_onnx
from gmmvit_deploy.runtime.openvino import OPENVINO_HINTS, kernels_for_graph
from gmmvit_deploy.runtime.openvino_program import OpenVinoProgram

__all__ = ["RUNNERS", "cpu_program", "required_fused_graph", "required_kernels"]

RUNNERS: dict[str, Precision] = {"onnxruntime+kernels": "fp32", "openvino+kernels": "fp32"}
"""Name of a runner of the float32 graph, as for `open_runner` → precision of the runner's matrix products."""
if "avx512_bf16" in cpu_features():
    RUNNERS["openvino+kernels:bf16"] = "bf16"


def cpu_program(path: Path, runner: str, precision: Precision) -> Program:
    """Load a graph with our kernels.  Each call loads a new copy, whose weights have another place in memory.

    Errors: as `required_fused_graph` and `required_kernels`.
    """
    if runner == "onnxruntime+kernels":
        return program_from_onnx(path, fused=required_fused_graph(path)).run
    kernels = required_kernels(path, precision)
    return OpenVinoProgram(str(path), hint=OPENVINO_HINTS[precision], kernels=kernels).run


@lru_cache(maxsize=2)  # for a model and its plain model, each loaded many times
def required_fused_graph(path: Path) -> FusedGraph:
    """Return the graph with our attention kernel for ONNX Runtime.

    Errors: SystemExit with the reason when our kernel is not available.
    """
    fused, why = fused_graph(path)
    if fused is None:
        raise SystemExit(f"{path.name} in onnxruntime+kernels cannot be measured: {why}")
    return fused


def required_kernels(path: Path, precision: Precision) -> Kernels:
    """Return our kernels for a graph in OpenVINO.

    Errors: SystemExit with the reason when our kernels are not available.
    """
    kernels, why = kernels_for_graph(path, precision)
    if kernels is None:
        raise SystemExit(f"{path.name} in openvino+kernels:{precision} cannot be measured: {why}")
    return kernels
