"""Names of the runners, importable without any package that runs a model."""

from __future__ import annotations

from collections.abc import Collection

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.inference.precision import SPECS, Precision
from gmmvit_deploy.inference.runner_name import CASCADE_SUFFIX, RunnerName
from gmmvit_deploy.precision_names import precision_from
from gmmvit_deploy.runtimes.engines.flavors import FLAVORS

RUNNERS = (
    "eager",
    "eager-gpu",
    "compile",
    "compile-gpu",
    "onnxruntime",
    "onnxruntime-cuda",
    "onnxruntime-tensorrt",
    "openvino",
    "openvino+kernels",
    *FLAVORS,
    "triton-grpc",
    "triton-http",
)
"""Names of all runners, in the order of the waterfall benchmark: from the trained module to the server."""

ON_CPUS = ("openvino+kernels", "openvino", "onnxruntime")
ON_GPUS = ("onnxruntime-cuda", "onnxruntime-tensorrt")
"""Runners that run a graph of the bundle in the precision that the user names."""

CASCADES: tuple[Precision, ...] = ("int8", "bf16")
"""The precisions of `ON_CPUS` that may come first in a cascade."""

DEFAULT_URLS = {"triton-grpc": "grpc://localhost:8001", "triton-http": "http://localhost:8000"}
"""Runner of a server → its default address."""

IN_PROCESS = tuple(name for name in RUNNERS if name not in FLAVORS and name not in DEFAULT_URLS)
"""Runners that need neither a server nor an engine's folder."""


def runner_from(text: str, known: Collection[str] = RUNNERS, *, precision: Precision = "fp32") -> RunnerName:
    """Read the name of a runner that a user typed, such as ``openvino+kernels:bf16``.

    known: the runners that the command can use.  precision: of a name without a precision.
    Errors: InputError when the runner, the precision or the form is unknown, or the command cannot use the runner.
    """
    runner = RunnerName.parse(text, precision)
    if runner.name not in RUNNERS:
        raise InputError(f"runner {runner.name!r} is not known", hint=f"use one or more of {', '.join(RUNNERS)}")
    if runner.name not in known:
        raise InputError(
            f"--runner {runner.name}: this command cannot use this runner", hint=f"type one of {', '.join(known)}"
        )
    forms = SPECS[precision_from(runner.precision)].forms
    if runner.form and (runner.form not in forms or runner.name not in ON_CPUS):
        raise InputError(
            f"runner {text}: {runner.name}:{runner.precision} has no form {runner.form!r}",
            hint=f"type the precision alone; only int8 of {', '.join(ON_CPUS)} has forms: "
            f"{', '.join(SPECS['int8'].forms)}",
        )
    if runner.cascade and (runner.precision not in CASCADES or runner.name not in ON_CPUS):
        raise InputError(
            f"runner {text}: expected int8 or bf16 on a CPU before {CASCADE_SUFFIX}, which computes nearly undecided "
            "images again",
            hint="type a name such as openvino+kernels:int8+fp32",
        )
    return runner
