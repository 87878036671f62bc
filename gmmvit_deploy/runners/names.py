"""Names of the runners, importable without any package that runs a model."""

from __future__ import annotations

from gmmvit_deploy.engines.flavors import FLAVORS
from gmmvit_deploy.errors import InputError

__all__ = ["DEFAULT_URLS", "KERNELS_SUFFIX", "RUNNERS", "require_runner"]

KERNELS_SUFFIX = "+kernels"
"""Suffix of a runtime's name: the graph runs with the CPU kernels of this project."""

RUNNERS = (
    "eager",
    "eager-gpu",
    "compile",
    "compile-gpu",
    "onnxruntime",
    "onnxruntime+kernels",
    "openvino",
    "openvino+kernels",
    *FLAVORS,
    "triton-grpc",
    "triton-http",
)
"""In the order of a waterfall: from the trained module to the server."""

DEFAULT_URLS = {"triton-grpc": "grpc://localhost:8001", "triton-http": "http://localhost:8000"}
"""Runner of a server → its default address."""


def require_runner(name: str) -> None:
    """Check the name of a runner.  Errors: InputError when no runner has this name."""
    if name not in RUNNERS:
        raise InputError(f"runner {name!r} is not known", hint=f"known: {', '.join(RUNNERS)}")
