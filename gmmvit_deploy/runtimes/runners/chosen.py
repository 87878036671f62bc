"""Choose the runner and the precision for a bundle on this machine.

The first of these that can run here is taken:

1. the candidates that passed in the entry of this kind of machine in ``runners.json``, best first (`bundle.choices`);
2. if ``gmmvit optimize`` did not run here: the float32 programs that ``gmmvit export`` proved and timed, in the same
   file (`exporting.fastest`);
3. the runner that is usually the fastest on a CPU, in float32 (`open.fastest_runner`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

from gmmvit_deploy.bundle.artifacts import Bundle, tool_versions
from gmmvit_deploy.bundle.cascades import read_cascade
from gmmvit_deploy.bundle.choices import CHOICES_FILE, Candidate, Choice, Machine, read_choices
from gmmvit_deploy.errors import BundleError, MissingDependencyError, RunnerUnavailableError
from gmmvit_deploy.inference.cores import cores, cpu_features, cpu_name
from gmmvit_deploy.inference.precision import ONNXRUNTIME_PRECISIONS
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.runtimes.engines.flavors import visible_gpu
from gmmvit_deploy.runtimes.programs.onnxruntime import require_onnxruntime
from gmmvit_deploy.runtimes.programs.onnxruntime_providers import CUDA, TENSORRT, require_provider
from gmmvit_deploy.runtimes.programs.openvino import kernels_for_graph, why_no_openvino
from gmmvit_deploy.runtimes.runners.names import ON_CPUS, ON_GPUS
from gmmvit_deploy.runtimes.runners.open import fastest_runner, graph_of

_PROVIDERS = {"onnxruntime-cuda": CUDA, "onnxruntime-tensorrt": TENSORRT}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRunner:
    """The runner to take.

    notes: what the user should know: why a faster runner is not used, or why ``runners.json`` is not.
    measured: True if ``runners.json`` names it for this machine.  judged: True if it passed a gate there.
    """

    runner: RunnerName
    notes: tuple[str, ...] = ()
    measured: bool = False
    judged: bool = False


@cache
def this_machine() -> Machine:
    """Return the kind of this machine.  Virtual machines often hide the processor's model, but not what it computes."""
    gpu = visible_gpu()
    return Machine(
        cpu=f"{cpu_name()} ({' '.join(cpu_features())})", cores=cores(), gpu=gpu.name if gpu is not None else ""
    )


def runtime_versions() -> dict[str, str]:
    """Return name → version of the packages with which runners run, and of the GPU's driver."""
    gpu = visible_gpu()
    return tool_versions("openvino") | ({"driver": gpu.driver} if gpu is not None else {})


def changed_versions(choice: Choice, runner: RunnerName) -> list[str]:
    """Return ``openvino 1 → 2`` for each version of what the runner loads that differs from that of the choice."""
    now = runtime_versions()
    runtimes = ("openvino",) if runner.runtime == "openvino" else ("onnxruntime", "onnxruntime-gpu")
    names = (*runtimes, "numpy", "pillow", "gmmvit-deploy", *(("driver",) if runner.name in ON_GPUS else ()))
    return [
        f"{name} {choice.versions.get(name, 'absent')} → {now.get(name, 'absent')}"
        for name in names
        if choice.versions.get(name) != now.get(name)
    ]


def choice_of_this_machine(bundle: Bundle) -> tuple[Choice | None, str]:
    """Return (the entry of this kind of machine in ``runners.json``, or None; why a choice is not used, or "")."""
    entries, why = read_choices(bundle.path)
    own = next((entry for entry in entries if entry.machine == this_machine()), None)
    if own is None and (others := [str(entry.machine) for entry in entries if entry.gate is not None]):
        why = (
            f"{bundle.path / CHOICES_FILE} has no choice for this kind of machine, {this_machine()}, only for "
            f"{' and '.join(others)}; type gmmvit optimize {bundle.path} to choose here"
        )
    return own, why


def choose_runner(bundle: Bundle, runners: Collection[str] = (*ON_CPUS, *ON_GPUS)) -> ChosenRunner:
    """Return the best runner that passed on this kind of machine and can run here, else the usual runner.

    runners: the runners that the caller can take.  Errors: BundleError when the float32 graph was changed.
    """
    choice, why = choice_of_this_machine(bundle)
    notes = [why] if why else []
    for candidate in choice.passed if choice is not None else ():
        reason = _why_not(bundle, candidate, runners)
        if not reason:
            judged = choice is not None and choice.gate is not None
            if choice is not None and judged and (changed := changed_versions(choice, candidate.runner)):
                notes.append(
                    f"{candidate.runner} was judged with other versions: {', '.join(changed)}; type gmmvit optimize "
                    f"{bundle.path} to judge it with those of now"
                )
            return ChosenRunner(runner=candidate.runner, notes=tuple(notes), measured=True, judged=judged)
        notes.append(f"{candidate.runner} is not used, though {CHOICES_FILE} prefers it on this machine: {reason}")
    name, slower = fastest_runner(bundle)
    if slower:
        notes.append(f"not the fastest runner: {slower}")
    return ChosenRunner(runner=RunnerName.parse(name), notes=tuple(notes))


def _why_not(bundle: Bundle, candidate: Candidate, runners: Collection[str]) -> str:
    """Return why a candidate cannot be taken; "" if it can."""
    runner = candidate.runner
    if runner.name not in runners:
        return f"only {', '.join(runners)} can be used here"
    try:
        graph = graph_of(bundle, runner)
        if runner.cascade and read_cascade(bundle, runner, graph.sha256).threshold != candidate.threshold:
            return f"another threshold was judged; type gmmvit optimize {bundle.path} to judge that of the bundle"
    except BundleError as exc:
        return str(exc)
    if graph.sha256 != candidate.graph_sha256:
        return f"{graph.path.name} is not the graph that was judged; type gmmvit optimize {bundle.path} to judge it"
    if runner.runtime == "openvino":
        why = why_no_openvino(runner.precision, dynamic=graph.form == "dynamic")
        if not why and runner.kernels:
            kernels, why = kernels_for_graph(graph.path, runner.precision)
            return "" if kernels is not None else why
        return why
    try:
        if runner.name in _PROVIDERS:
            require_provider(_PROVIDERS[runner.name])
        else:
            require_onnxruntime()
    except (MissingDependencyError, RunnerUnavailableError) as exc:
        return str(exc)
    if runner.name in ON_CPUS and (runner.precision not in ONNXRUNTIME_PRECISIONS or graph.only_openvino):
        return f"ONNX Runtime cannot run {graph.path.name} on a CPU"
    return ""
