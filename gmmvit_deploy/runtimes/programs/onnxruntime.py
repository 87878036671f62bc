"""Run graphs in ONNX Runtime on the CPU, with built-in operators or with this project's CPU attention kernel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gmmvit_deploy.errors import BundleError
from gmmvit_deploy.runtimes.kernels.libraries import onnxruntime_library
from gmmvit_deploy.runtimes.kernels.matcher import summary_of
from gmmvit_deploy.runtimes.kernels.onnxruntime_kernels import attentions_of_kernel, with_fused_attention
from gmmvit_deploy.runtimes.programs.onnxruntime_package import import_onnxruntime
from gmmvit_deploy.runtimes.programs.onnxruntime_program import OnnxRuntimeProgram, session_options, why_not

if TYPE_CHECKING:
    from gmmvit_deploy.precision import Precision

__all__ = [
    "ONNXRUNTIME_PRECISIONS",
    "FusedGraph",
    "fused_graph",
    "program_from_onnx",
    "session_from_bytes",
    "session_from_onnx",
]

ONNXRUNTIME_PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int8")
"""Precisions whose graphs ONNX Runtime loads on a CPU.

On a CPU, ONNX Runtime has no matrix product in bfloat16, and does not quantise to float8.
"""


class FusedGraph(NamedTuple):
    """A graph in which nodes of this project's CPU attention kernel replace attentions.

    graph: the serialised graph.  library: the shared library of the kernel.
    attentions: how many attentions of the graph the kernel computes, and the reason why the kernel does not compute
    each other attention (`summary_of`).
    """

    graph: bytes
    library: Path
    attentions: str


def fused_graph(path: Path) -> tuple[FusedGraph | None, str]:
    """Load a graph, and replace each attention that this project's CPU kernel computes by a node of the kernel.

    The first call on a machine compiles the kernel, which takes some seconds.
    Returns (the graph, "") or (None, the reason why the kernel computes no attention of the graph).
    """
    import onnx
    from google.protobuf.message import DecodeError

    library, why = onnxruntime_library()
    why = why_not(library) if library is not None else why
    if library is None or why:
        return None, why
    try:
        plain = onnx.load(path)
        proto, replaced = with_fused_attention(plain)
    except (OSError, DecodeError) as exc:  # ONNX Runtime reports a broken file when the caller loads it
        return None, str(exc)
    attentions = summary_of(attentions_of_kernel(plain))
    if not replaced:
        return None, f"our kernel takes no attention of this graph: {attentions}"
    return FusedGraph(proto.SerializeToString(), library, attentions), ""


def program_from_onnx(
    path: Path, *, threads: int = 0, chunk: int = 0, fused: FusedGraph | None = None
) -> OnnxRuntimeProgram:
    """Open a graph as a program that divides large batches into chunks, and runs the chunks in parallel.

    threads: the number of threads; 0 uses a thread per core.  chunk: as in `OnnxRuntimeProgram`.
    fused: the same graph with this project's CPU attention kernel. With None, ONNX Runtime computes attention with its
    built-in operators.
    Errors: as `session_from_onnx`.
    """
    if fused is None:
        return OnnxRuntimeProgram(lambda number: session_from_onnx(path, threads=number), threads=threads, chunk=chunk)
    graph, library, _ = fused
    return OnnxRuntimeProgram(
        lambda number: _session(graph, str(path), number, library=library),
        threads=threads,
        chunk=chunk,
    )


def session_from_onnx(path: Path, *, threads: int | None = None) -> Any:
    """Open an ``onnxruntime.InferenceSession`` on the CPU provider.

    threads: the number of threads for an operator. None uses ONNX Runtime's default, a thread per core.
    Errors: as `import_onnxruntime`.
    BundleError when ONNX Runtime cannot load the graph.
    """
    return _session(str(path), str(path), threads)


def session_from_bytes(
    graph: bytes, name: str, *, threads: int | None = None, exact: bool = False, library: Path | None = None
) -> Any:
    """Open a serialised graph as an ``onnxruntime.InferenceSession`` on the CPU provider.

    name: the graph's name in error messages.  threads: as in `session_from_onnx`.
    exact: True to turn optimisation off, so that ONNX Runtime omits no rounding of the graph.
    library: the shared library of this project's CPU kernel, for a graph with nodes of this kernel.
    Errors: as `session_from_onnx`.
    """
    return _session(graph, name, threads, exact=exact, library=library)


def _session(
    graph: str | bytes, name: str, threads: int | None, *, exact: bool = False, library: Path | None = None
) -> Any:
    onnxruntime = import_onnxruntime()
    try:
        options = session_options(threads, library)
        if exact:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    # ONNX Runtime raises a dozen unrelated exception classes for graphs that it cannot load.
    except Exception as exc:
        raise BundleError(f"{name}: ONNX Runtime {onnxruntime.__version__} cannot load this graph: {exc}") from exc
