"""Turn the runner that the user names, or the choice of a bundle for this machine, into options of a repository."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.runtimes.runners.chosen import ChosenRunner, choose_runner, runner_from
from gmmvit_deploy.runtimes.runners.names import ON_CPUS, ON_GPUS
from gmmvit_deploy.serving.names import runtime_from
from gmmvit_deploy.serving.options import RepositoryOptions

if TYPE_CHECKING:
    from gmmvit_deploy.bundle.artifacts import Bundle
    from gmmvit_deploy.serving.installs import ServerInstall

__all__ = ["options_for_server", "resolved_options", "with_runner"]


def with_runner(options: RepositoryOptions, chosen: ChosenRunner) -> RepositoryOptions:
    """Return the options with a runner in a precision: on a CPU in the python backend, on a GPU in ONNX Runtime's.

    A backend that ``options`` states stays. Errors: InputError when it cannot run the runner.
    """
    if options.backend == "tensorrt":
        raise InputError(
            f"--runner {chosen.label} does not go with --backend tensorrt, which runs the engine of --engine",
            hint="remove --runner, or remove --backend and --engine",
        )
    if chosen.runner in ON_GPUS:
        accelerator = chosen.runner.partition("-")[2]
        if options.accelerator not in ("none", accelerator):
            raise InputError(
                f"--runner {chosen.runner} does not go with --accelerator {options.accelerator}",
                hint="type one of them",
            )
        return replace(options, backend="onnxruntime", accelerator=accelerator, precision=chosen.precision)
    if options.backend == "onnxruntime":
        if chosen.runner != "onnxruntime":
            raise InputError(
                f"--runner {chosen.runner} needs --backend python, got --backend onnxruntime",
                hint=f"type --backend onnxruntime --runner onnxruntime:{chosen.precision}, or remove --backend",
            )
        return replace(options, precision=chosen.precision)
    runtime, kernels = runtime_from(chosen.runner)
    return replace(options, runtime=runtime, cpu_kernels=kernels, precision=chosen.precision)


def resolved_options(
    bundle: Bundle, options: RepositoryOptions, runners: Collection[str] = ON_CPUS
) -> tuple[RepositoryOptions, tuple[str, ...]]:
    """Return (options that state a runner, what the user should know).

    Options that leave the runner open get the bundle's choice for this machine.
    runners: those that may be taken.
    """
    if not options.leaves_runner_open:
        return options, ()
    chosen = choose_runner(bundle, runners)
    return with_runner(options, chosen), chosen.notes


def options_for_server(
    bundle: Bundle, options: RepositoryOptions, install: ServerInstall, runner: str | None
) -> tuple[RepositoryOptions, tuple[str, ...]]:
    """Return (options for a server, what the user should know).

    A runner that the server's own ONNX Runtime backend can run as well is run there: it is written in C++.
    runner: ``NAME[:PRECISION]``; None takes the choice for this machine.
    Errors: InputError when the server cannot run the runner.
    """
    own = install.best_backend == "onnxruntime"
    if runner is None:
        chosen = choose_runner(bundle, (*ON_CPUS, *ON_GPUS) if own else ON_CPUS)
        if own and not chosen.measured and "onnxruntime" not in bundle.manifest.wrong_runners:
            chosen = ChosenRunner(runner="onnxruntime", notes=chosen.notes)
    else:
        chosen = runner_from(runner)
        if chosen.runner in ON_GPUS and not own:
            raise InputError(
                f"--runner {chosen.runner} needs a server with the ONNX Runtime backend, and {install.binary} has "
                f"only {', '.join(install.backend_names)}",
                hint="type --tritonserver with the server of NVIDIA's container, or another --runner",
            )
    if own and chosen.runner == "onnxruntime" and chosen.precision in ("fp32", "fp16"):
        options = replace(options, backend="onnxruntime")
    return with_runner(options, chosen), chosen.notes
