"""Names of the runners, importable without any package that runs a model."""

from __future__ import annotations

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.runtimes.engines.flavors import FLAVORS

__all__ = ["DEFAULT_URLS", "KERNELS_SUFFIX", "RUNNERS", "require_runner"]

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

DEFAULT_URLS = {"triton-grpc": "grpc://localhost:8001", "triton-http": "http://localhost:8000"}
"""Runner of a server → its default address."""


def require_runner(name: str) -> None:
    """Check the name of a runner.  Errors: InputError when no runner has this name."""
    if name not in RUNNERS:
        raise InputError(f"runner {name!r} is not known", hint=f"use one or more of {', '.join(RUNNERS)}")
