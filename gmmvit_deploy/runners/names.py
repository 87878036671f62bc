"""The names of the runners, for those who only list them: nothing is imported here that runs a model."""

from __future__ import annotations

from gmmvit_deploy.engines.flavors import FLAVORS
from gmmvit_deploy.errors import InputError

__all__ = ["DEFAULT_URLS", "KERNELS_SUFFIX", "RUNNERS", "require_runner"]

KERNELS_SUFFIX = "+kernels"
"""Behind the name of a runtime: the graph runs with the CPU kernels of this project."""

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
"""From the trained module to the server: the order in which a waterfall shows them."""

DEFAULT_URLS = {"triton-grpc": "grpc://localhost:8001", "triton-http": "http://localhost:8000"}
"""Runner of a server → the address that it asks when none is given."""


def require_runner(name: str) -> None:
    """Errors: InputError when no runner has this name."""
    if name not in RUNNERS:
        raise InputError(f"runner {name!r} is not known", hint=f"known: {', '.join(RUNNERS)}")
