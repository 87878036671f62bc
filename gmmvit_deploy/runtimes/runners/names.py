"""Names of the runners, importable without any package that runs a model."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.precision import precision_behind
from gmmvit_deploy.runtimes.engines.flavors import FLAVORS

if TYPE_CHECKING:
    from gmmvit_deploy.precision import Precision

__all__ = [
    "DEFAULT_URLS",
    "IN_PROCESS",
    "KERNELS_SUFFIX",
    "ON_CPUS",
    "ON_GPUS",
    "RUNNERS",
    "require_runner",
    "runner_of",
]

KERNELS_SUFFIX = "+kernels"
"""Suffix of a runner's name: the graph runs with this project's CPU kernels."""

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

DEFAULT_URLS = {"triton-grpc": "grpc://localhost:8001", "triton-http": "http://localhost:8000"}
"""Runner of a server → its default address."""

IN_PROCESS = tuple(name for name in RUNNERS if name not in FLAVORS and name not in DEFAULT_URLS)
"""Runners that need neither a server nor an engine's folder."""


def require_runner(name: str) -> None:
    """Check the name of a runner.  Errors: InputError when no runner has this name."""
    if name not in RUNNERS:
        raise InputError(f"runner {name!r} is not known", hint=f"use one or more of {', '.join(RUNNERS)}")


def runner_of(text: str, known: Collection[str]) -> tuple[str, Precision]:
    """Split ``NAME[:PRECISION]`` into name and precision, fp32 if there is none.

    known: the runners that the command can use.
    Errors: InputError when the runner or the precision is unknown, or the command cannot use the runner.
    """
    name, precision = precision_behind(text)
    require_runner(name)
    if name not in known:
        raise InputError(
            f"--runner {name}: this command cannot use this runner", hint=f"type one of {', '.join(known)}"
        )
    return name, precision or "fp32"
