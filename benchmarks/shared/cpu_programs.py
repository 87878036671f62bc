"""A graph in each runtime that serves it on a CPU, with our kernels in it, as our runners run it.

Without our kernels these programs do not exist, and the script ends with the reason: a plain program is never timed
under their names.
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
"""Runners of a float32 graph, by the names that `open_runner` knows, and what their products compute in."""
if "avx512_bf16" in cpu_features():
    RUNNERS["openvino+kernels:bf16"] = "bf16"


def cpu_program(path: Path, runner: str, precision: Precision) -> Program:
    """With our own attention kernel; each call makes another, whose weights lie elsewhere in memory.

    Errors: as `required_fused_graph` and `required_kernels`.
    """
    if runner == "onnxruntime+kernels":
        return program_from_onnx(path, fused=required_fused_graph(path)).run
    kernels = required_kernels(path, precision)
    return OpenVinoProgram(str(path), hint=OPENVINO_HINTS[precision], kernels=kernels).run


@lru_cache(maxsize=2)  # of a model and its twin, each of which is loaded again and again
def required_fused_graph(path: Path) -> FusedGraph:
    """The graph with our attention in it, for ONNX Runtime.  Errors: SystemExit with the reason why there is none."""
    fused, why = fused_graph(path)
    if fused is None:
        raise SystemExit(f"{path.name} in onnxruntime+kernels cannot be measured: {why}")
    return fused


def required_kernels(path: Path, precision: Precision) -> Kernels:
    """Our kernels for a graph in OpenVINO.  Errors: SystemExit with the reason why there are none for it."""
    kernels, why = kernels_for_graph(path, precision)
    if kernels is None:
        raise SystemExit(f"{path.name} in openvino+kernels:{precision} cannot be measured: {why}")
    return kernels
