"""Run graphs in ONNX Runtime on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import BundleError
from gmmvit_deploy.runtimes.programs.onnxruntime_package import import_onnxruntime
from gmmvit_deploy.runtimes.programs.onnxruntime_program import OnnxRuntimeProgram, session_options

if TYPE_CHECKING:
    from gmmvit_deploy.precision import Precision

__all__ = [
    "ONNXRUNTIME_PRECISIONS",
    "program_from_onnx",
    "session_from_bytes",
    "session_from_onnx",
]

ONNXRUNTIME_PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int8")
"""Precisions whose graphs ONNX Runtime loads on a CPU.

On a CPU, ONNX Runtime has no matrix product in bfloat16, and does not quantise to float8.
"""


def program_from_onnx(path: Path, *, threads: int = 0, chunk: int = 0) -> OnnxRuntimeProgram:
    """Open a graph as a program that divides large batches into chunks, and runs the chunks in parallel.

    threads: the number of threads; 0 uses a thread per core.  chunk: as in `OnnxRuntimeProgram`.
    Errors: as `session_from_onnx`.
    """
    return OnnxRuntimeProgram(lambda number: session_from_onnx(path, threads=number), threads=threads, chunk=chunk)


def session_from_onnx(path: Path, *, threads: int | None = None) -> Any:
    """Open an ``onnxruntime.InferenceSession`` on the CPU provider.

    threads: the number of threads for an operator. None uses ONNX Runtime's default, a thread per core.
    Errors: as `import_onnxruntime`.
    BundleError when ONNX Runtime cannot load the graph.
    """
    return _session(str(path), str(path), threads)


def session_from_bytes(graph: bytes, name: str, *, threads: int | None = None, exact: bool = False) -> Any:
    """Open a serialised graph as an ``onnxruntime.InferenceSession`` on the CPU provider.

    name: the graph's name in error messages.  threads: as in `session_from_onnx`.
    exact: True to turn optimisation off, so that ONNX Runtime omits no rounding of the graph.
    Errors: as `session_from_onnx`.
    """
    return _session(graph, name, threads, exact=exact)


def _session(graph: str | bytes, name: str, threads: int | None, *, exact: bool = False) -> Any:
    onnxruntime = import_onnxruntime()
    try:
        options = session_options(threads)
        if exact:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    # ONNX Runtime raises a dozen unrelated exception classes for graphs that it cannot load.
    except Exception as exc:
        raise BundleError(f"{name}: ONNX Runtime {onnxruntime.__version__} cannot load this graph: {exc}") from exc
