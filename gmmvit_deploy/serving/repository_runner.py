"""Complete the options of a repository with the runner that the user names, or with the choice for this machine."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from gmmvit_deploy.bundle.variants import cpu_form
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.inference.precision import QUANTIZED
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.runtimes.runners.chosen import ChosenRunner, choose_runner
from gmmvit_deploy.runtimes.runners.names import ON_CPUS, ON_GPUS, runner_from
from gmmvit_deploy.serving.names import Backend
from gmmvit_deploy.serving.options import RepositoryOptions

if TYPE_CHECKING:
    from gmmvit_deploy.bundle.artifacts import Bundle
    from gmmvit_deploy.serving.installs import ServerInstall


def with_runner(options: RepositoryOptions, runner: RunnerName) -> RepositoryOptions:
    """Return the options with a runner: on a GPU in Triton's ONNX Runtime backend in place of the default.

    Errors: InputError when the backend cannot run the runner.
    """
    backend: Backend = "onnxruntime" if runner.name in ON_GPUS and options.backend == "python" else options.backend
    return replace(options, runner=runner, backend=backend)


def resolved_options(
    bundle: Bundle, options: RepositoryOptions, runners: Collection[str] = ON_CPUS
) -> tuple[RepositoryOptions, tuple[str, ...]]:
    """Return (options that state a runner and the form of its int8 graph, what the user should know).

    Options without a runner get the bundle's choice for this machine. An engine needs no runner.
    runners: those that may be taken.
    """
    notes: tuple[str, ...] = ()
    if options.runner is None and options.backend == "onnxruntime":
        options = replace(options, runner=RunnerName("onnxruntime"))
    elif options.runner is None and options.backend != "tensorrt":
        chosen = choose_runner(bundle, runners)
        options, notes = with_runner(options, chosen.runner), chosen.notes
    runner = options.runner
    if runner is not None and runner.name in ON_CPUS and not runner.form:
        options = replace(options, runner=replace(runner, form=cpu_form(bundle, runner.precision)))
    return options, notes


def options_for_server(
    bundle: Bundle, options: RepositoryOptions, install: ServerInstall, runner: str | None
) -> tuple[RepositoryOptions, tuple[str, ...]]:
    """Return (options for a server, what the user should know).

    A runner that the server's own ONNX Runtime backend can run as well is run there: it is written in C++.
    runner: as after ``--runner``; None takes the choice for this machine.
    Errors: InputError when the server cannot run the runner.
    """
    own = install.best_backend == "onnxruntime"
    if runner is None:
        chosen = choose_runner(bundle, (*ON_CPUS, *ON_GPUS) if own else ON_CPUS)
        if own and not chosen.measured and "onnxruntime" not in bundle.manifest.wrong_runners:
            chosen = ChosenRunner(runner=RunnerName("onnxruntime"), notes=chosen.notes)
    else:
        chosen = ChosenRunner(runner=runner_from(runner, (*ON_CPUS, *ON_GPUS)))
        if chosen.runner.name in ON_GPUS and not own:
            raise InputError(
                f"--runner {chosen.runner} needs a server with the ONNX Runtime backend, and {install.binary} has "
                f"only {', '.join(install.backend_names)}",
                hint="type --tritonserver with the server of NVIDIA's container, or another --runner",
            )
    if own and chosen.runner.name == "onnxruntime" and chosen.runner.precision not in QUANTIZED:
        options = replace(options, backend="onnxruntime")
    return with_runner(options, chosen.runner), chosen.notes
