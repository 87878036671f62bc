"""A graph in each runtime that serves it on a CPU, with our kernels in it, as our runners run it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from gmmvit_deploy.bench.interleaved import Program
from gmmvit_deploy.bench.machine import cpu_features
from gmmvit_deploy.precision import Precision
from gmmvit_deploy.runtime.onnxruntime import fused_graph, program_from_onnx
from gmmvit_deploy.runtime.openvino import OPENVINO_HINTS, our_kernels
from gmmvit_deploy.runtime.openvino_program import OpenVinoProgram

__all__ = ["RUNNERS", "cpu_program"]

RUNNERS: dict[str, Precision] = {"onnxruntime+kernels": "fp32", "openvino+kernels": "fp32"}
"""Runners of a float32 graph, by the names that `open_runner` knows, and what their products compute in."""
if "avx512_bf16" in cpu_features():
    RUNNERS["openvino+kernels:bf16"] = "bf16"


_fused = lru_cache(maxsize=2)(fused_graph)  # of a model and its twin, each of which is loaded again and again


def cpu_program(path: Path, runner: str, precision: Precision) -> Program:
    """With our own attention kernel; each call makes another, whose weights lie elsewhere in memory."""
    if runner == "onnxruntime+kernels":
        return program_from_onnx(path, fused=_fused(path)[0]).run
    kernels = our_kernels(precision)[0]
    return OpenVinoProgram(str(path), hint=OPENVINO_HINTS[precision], kernels=kernels).run
