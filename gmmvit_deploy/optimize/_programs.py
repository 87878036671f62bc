"""The programs that a machine can try: runners, each in a precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.errors import GmmvitError, RunnerUnavailableError
from gmmvit_deploy.optimize._graphs import Form, Graph, Graphs
from gmmvit_deploy.precision import Precision, graph_precision
from gmmvit_deploy.progress import OnProgress, Progress
from gmmvit_deploy.runtimes.engines.engine_from_onnx import engine_from_bundle, engine_name
from gmmvit_deploy.runtimes.engines.flavors import FLAVORS, find_flavor, visible_gpu
from gmmvit_deploy.runtimes.engines.options import BuildOptions
from gmmvit_deploy.runtimes.programs.openvino import why_no_openvino
from gmmvit_deploy.runtimes.runners.open import open_runner
from gmmvit_deploy.runtimes.runners.runner import Runner

__all__ = ["Program", "opened_programs"]

_OPENVINO = ("openvino", "openvino+kernels")
_ON_CPUS = ("onnxruntime", *_OPENVINO)
_ON_GPUS = ("onnxruntime-cuda", "onnxruntime-tensorrt", "tensorrt")
_OF_CPUS: dict[Graph, tuple[str, ...]] = {
    ("fp32", ""): _ON_CPUS,
    ("bf16", ""): _OPENVINO,
    ("fp16", ""): ("onnxruntime",),
    ("int8", "static"): _ON_CPUS,
    ("int8", "dynamic"): _OPENVINO,
    ("int8", "mixed"): _OPENVINO,
}
_OF_GPUS: tuple[Graph, ...] = (("fp32", ""), ("bf16", ""), ("fp16", ""), ("int8", "static"))


class Program(NamedTuple):
    """A runner in a precision.  form: of its int8 graph."""

    runner: str
    precision: Precision
    form: Form = ""

    @property
    def words(self) -> str:
        return " ".join(filter(None, self))

    @property
    def is_engine(self) -> bool:
        return self.runner in FLAVORS

    @property
    def on_gpu(self) -> bool:
        return self.runner in _ON_GPUS


def opened_programs(
    bundle: Bundle, graphs: Graphs, stack: ExitStack, on_progress: OnProgress
) -> tuple[dict[Program, Runner], dict[Program, str]]:
    """Open every program that this machine has; ``stack`` closes them.

    Returns (the opened programs, program → why it cannot run here).
    """
    opened: dict[Program, Runner] = {}
    left_out: dict[Program, str] = {}
    for program in _programs():
        on_progress(Progress(f"open {program.words}"))
        try:
            opened[program] = stack.enter_context(_opened(program, bundle, graphs, on_progress))
        except GmmvitError as exc:
            left_out[program] = str(exc)
    return opened, left_out


def _programs() -> Iterator[Program]:
    for graph, names in _OF_CPUS.items():
        yield from (Program(name, *graph) for name in names)
    if visible_gpu() is not None:
        for graph in _OF_GPUS:
            yield from (Program(name, *graph) for name in _ON_GPUS)


def _opened(program: Program, bundle: Bundle, graphs: Graphs, on_progress: OnProgress) -> Runner:
    """Open a program.  Errors: every error of a runner that cannot run here; RunnerUnavailableError without a graph."""
    name, precision, form = program
    of_openvino = name in _OPENVINO
    # For bf16, OpenVINO loads the float32 graph.
    graph: Graph = (graph_precision(precision), form) if of_openvino else (precision, form)
    if graph in graphs.left_out:
        raise RunnerUnavailableError(graphs.left_out[graph])
    if of_openvino and (why := why_no_openvino(precision, dynamic=form == "dynamic")):
        raise RunnerUnavailableError(why)
    holder = graphs.bundles[graph]
    if name not in FLAVORS:
        return open_runner(name, holder, precision=precision)
    if holder is not bundle:  # an engine lies beside the graph that it was built from
        raise RunnerUnavailableError("engines are built from graphs in the bundle: type gmmvit convert first")
    flavor, options = find_flavor(name), BuildOptions(precision=precision)
    folder = bundle.path / "engines" / engine_name(options, flavor)
    if not folder.exists():
        engine_from_bundle(bundle, open_variant(bundle, precision), options, flavor, on_progress=on_progress)
    return open_runner(name, bundle, engine=folder)
