"""List the backends and runtimes of a Triton repository by name, without importing what implements them."""

from __future__ import annotations

from typing import Literal, get_args

from gmmvit_deploy.errors import InputError

__all__ = ["ACCELERATORS", "BACKENDS", "RUNTIMES", "Backend", "CpuKernels", "Runtime", "runtime_from"]

Backend = Literal["onnxruntime", "python", "tensorrt"]
Runtime = Literal["onnxruntime", "openvino"]
CpuKernels = Literal["auto", "on", "off"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
ACCELERATORS = ("none", "tensorrt")
RUNTIMES = tuple(f"{runtime}{kernels}" for runtime in get_args(Runtime) for kernels in ("", "+kernels"))
"""Runtimes of the python backend: each with its own operators, and with the CPU kernels of this project."""


def runtime_from(name: str) -> tuple[Runtime, CpuKernels]:
    """Split a name: ``openvino+kernels`` → (openvino, on); ``openvino`` → (openvino, off).

    Errors: InputError on an unknown name.
    """
    if name not in RUNTIMES:
        raise InputError(f"runtime {name!r} is not known", hint=f"known: {', '.join(RUNTIMES)}")
    runtime, plus, _ = name.partition("+")
    return runtime, "on" if plus else "off"  # type: ignore[return-value]  # checked above
