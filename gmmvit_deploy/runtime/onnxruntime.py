"""ONNX Runtime on the CPU: sessions, programs, and graphs with our own attention."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gmmvit_deploy.errors import BundleError
from gmmvit_deploy.extras import require
from gmmvit_deploy.kernels.libraries import onnxruntime_library
from gmmvit_deploy.kernels.matcher import summary_of
from gmmvit_deploy.kernels.onnxruntime_kernels import attentions_of_kernel, with_fused_attention
from gmmvit_deploy.runtime.onnxruntime_program import OnnxRuntimeProgram, session_options, why_not

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

It has no matrix product in bfloat16 there, and does not quantise to float8.
"""


class FusedGraph(NamedTuple):
    """graph: serialised, its attention in our own operation.  library: that has it.

    attentions: how many of the graph's attentions our kernel computes, and why it does not take the others.
    """

    graph: bytes
    library: Path
    attentions: str


def fused_graph(path: Path) -> tuple[FusedGraph | None, str]:
    """(the graph with our own attention, ""); or (None, why attention is left to ONNX Runtime).

    The first call on a machine compiles our kernel, which takes some seconds.
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
    except (OSError, DecodeError) as exc:  # ONNX Runtime will say what is wrong with it
        return None, str(exc)
    attentions = summary_of(attentions_of_kernel(plain))
    if not replaced:
        return None, f"none of its attention has the form that our kernel takes: {attentions}"
    return FusedGraph(proto.SerializeToString(), library, attentions), ""


def program_from_onnx(path: Path, *, threads: int = 0, fused: FusedGraph | None = None) -> OnnxRuntimeProgram:
    """A network that runs its batches in chunks, one a core.

    threads: 0 is one a core.  fused: of the same network; None leaves attention to ONNX Runtime.
    Errors: as `session_from_onnx`.
    """
    if fused is None:
        return OnnxRuntimeProgram(lambda number: session_from_onnx(path, threads=number), threads=threads)
    graph, library, _ = fused
    return OnnxRuntimeProgram(
        lambda number: _session(graph, str(path), number, library=library),
        threads=threads,
    )


def session_from_onnx(path: Path, *, threads: int | None = None) -> Any:
    """An ``onnxruntime.InferenceSession`` on the CPU provider.

    threads: of one operator; None leaves it to ONNX Runtime (one a core).
    Errors: MissingDependencyError; BundleError when ONNX Runtime cannot load the graph.
    """
    return _session(str(path), str(path), threads)


def session_from_bytes(graph: bytes, name: str, *, exact: bool = False, library: Path | None = None) -> Any:
    """As `session_from_onnx`, for a serialised graph that errors shall call ``name``.

    exact: no optimisation, so that every rounding the graph asks for takes place.
    library: that has our operators, where the graph has some.
    """
    return _session(graph, name, None, exact=exact, library=library)


def _session(
    graph: str | bytes, name: str, threads: int | None, *, exact: bool = False, library: Path | None = None
) -> Any:
    onnxruntime = require("onnxruntime", package="onnxruntime", extra="cpu")
    try:
        options = session_options(threads, library)
        if exact:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    # ONNX Runtime raises a dozen unrelated classes for a graph it cannot take.
    except Exception as exc:
        raise BundleError(f"{name}: ONNX Runtime {onnxruntime.__version__} cannot load it: {exc}") from exc
