"""The runners that a machine can try, each in a precision."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.errors import GmmvitError, RunnerUnavailableError
from gmmvit_deploy.optimize._graphs import Graph
from gmmvit_deploy.precision import graph_precision
from gmmvit_deploy.progress import OnProgress, Progress
from gmmvit_deploy.runner_name import RunnerName
from gmmvit_deploy.runtimes.engines.engine_from_onnx import engine_from_bundle, engine_name
from gmmvit_deploy.runtimes.engines.flavors import FLAVORS, find_flavor, visible_gpu
from gmmvit_deploy.runtimes.engines.options import BuildOptions
from gmmvit_deploy.runtimes.programs.openvino import why_no_openvino
from gmmvit_deploy.runtimes.runners.names import ON_GPUS
from gmmvit_deploy.runtimes.runners.open import open_runner
from gmmvit_deploy.runtimes.runners.runner import Runner

__all__ = ["PROGRAMS_OF_GPUS", "opened_programs"]

PROGRAMS_OF_GPUS = (*ON_GPUS, "tensorrt")
_OF_CPUS = (
    *("onnxruntime", "openvino", "openvino+kernels"),
    *("openvino:bf16", "openvino+kernels:bf16"),
    "onnxruntime:fp16",
    *("onnxruntime:int8-static", "openvino:int8-static", "openvino+kernels:int8-static"),
    *("openvino:int8-dynamic", "openvino+kernels:int8-dynamic"),
    *("openvino:int8-mixed", "openvino+kernels:int8-mixed"),
)
_OF_GPUS = tuple(f"{name}:{graph}" for graph in ("fp32", "bf16", "fp16", "int8") for name in PROGRAMS_OF_GPUS)


def opened_programs(
    bundle: Bundle, why_not: Mapping[Graph, str], stack: ExitStack, on_progress: OnProgress
) -> tuple[dict[RunnerName, Runner], dict[RunnerName, str]]:
    """Open every program that this machine has; ``stack`` closes them.

    why_not: graph → why the bundle has none.
    Returns (the opened programs, program → why it cannot run here).
    """
    opened: dict[RunnerName, Runner] = {}
    left_out: dict[RunnerName, str] = {}
    for program in map(RunnerName.parse, (*_OF_CPUS, *(_OF_GPUS if visible_gpu() is not None else ()))):
        on_progress(Progress(f"open {program}"))
        try:
            opened[program] = stack.enter_context(_opened(program, bundle, why_not, on_progress))
        except GmmvitError as exc:
            left_out[program] = str(exc)
    return opened, left_out


def _opened(program: RunnerName, bundle: Bundle, why_not: Mapping[Graph, str], on_progress: OnProgress) -> Runner:
    """Open a program.  Errors: every error of a runner that cannot run here; RunnerUnavailableError without a graph."""
    precision, form = program.precision, program.form
    of_openvino = program.runtime == "openvino"
    # For bf16, OpenVINO loads the float32 graph.
    graph: Graph = (graph_precision(precision), form) if of_openvino else (precision, form)
    if graph in why_not:
        raise RunnerUnavailableError(why_not[graph])
    if of_openvino and (why := why_no_openvino(precision, dynamic=form == "dynamic")):
        raise RunnerUnavailableError(why)
    if program.name not in FLAVORS:
        return open_runner(program, bundle)
    flavor, options = find_flavor(program.name), BuildOptions(precision=precision)
    folder = bundle.path / "engines" / engine_name(options, flavor)
    if not folder.exists():
        engine_from_bundle(bundle, open_variant(bundle, precision), options, flavor, on_progress=on_progress)
    return open_runner(program.name, bundle, engine=folder)
