"""Find the installed TensorRT or TensorRT for RTX, called flavors, and refuse options that a flavor does not support.

tensorrt       TensorRT, versions 10 and 11; builds only on the GPU that will run the engine
tensorrt-rtx   TensorRT for RTX; builds on any machine, for named compute capabilities of GeForce and workstation GPUs
"""

from __future__ import annotations

import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from gmmvit_deploy.errors import InputError, MissingDependencyError
from gmmvit_deploy.extras import require
from gmmvit_deploy.inference.precision import SPECS

if TYPE_CHECKING:
    from gmmvit_deploy.runtimes.engines.options import BuildOptions

FlavorName = Literal["tensorrt", "tensorrt-rtx"]
FLAVORS: tuple[FlavorName, ...] = get_args(FlavorName)
MODULES: dict[FlavorName, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU of this machine, as nvidia-smi reports it.  capability: the compute capability, such as ``8.9``."""

    name: str
    capability: str
    driver: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Flavor:
    """An installed TensorRT or TensorRT for RTX.

    capabilities: the compute capabilities that the flavor can build for; empty if the package lists none.
    """

    name: FlavorName
    version: str
    capabilities: tuple[str, ...]


def tensorrt_library(name: FlavorName) -> Any:
    """Import a flavor's Python module.  Errors: MissingDependencyError when the module is not installed."""
    try:
        return require(MODULES[name], package=name, extra=name)
    except MissingDependencyError as exc:
        if name == "tensorrt":
            exc.hint += (
                " 'tensorrt==10.9.0.*' for Triton 25.03; the page Triton on a GPU has the version of each release"
            )
        raise


def visible_gpu() -> Gpu | None:
    """Return the first GPU that nvidia-smi lists, or None without a GPU or without nvidia-smi."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        name, capability, driver = (part.strip() for part in answer.stdout.splitlines()[0].split(","))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None
    return Gpu(name=name, capability=capability, driver=driver)


def find_flavor(name: str) -> Flavor:
    """Return the installed flavor with this name.

    name: a flavor, or ``auto``: with a visible GPU, ``tensorrt`` if installed, otherwise ``tensorrt-rtx``.
    Errors: InputError when the name is not known.  MissingDependencyError when the flavor is not installed.
    """
    if name == "auto":
        if visible_gpu() is not None:
            with suppress(MissingDependencyError):
                return find_flavor("tensorrt")
        name = "tensorrt-rtx"
    for flavor in FLAVORS:
        if name == flavor:
            library = tensorrt_library(flavor)
            return Flavor(name=flavor, version=library.__version__, capabilities=_capabilities(library))
    raise InputError(f"flavor {name!r} is not known", hint=f"use auto, {' or '.join(FLAVORS)}")


def _capabilities(library: Any) -> tuple[str, ...]:
    kinds = getattr(library, "ComputeCapability", None)
    numbers = (name[2:] for name in getattr(kinds, "__members__", {}) if name.startswith("SM"))
    return tuple(sorted((f"{number[:-1]}.{number[-1]}" for number in numbers), key=float))


def refuse(options: BuildOptions, flavor: Flavor) -> None:
    """Check that the flavor can build with these options.  Errors: InputError with the reason if it cannot."""
    if flavor.name == "tensorrt-rtx":
        _refuse_rtx(options, flavor)
    else:
        _refuse_tensorrt(options, flavor)


def _refuse_rtx(options: BuildOptions, flavor: Flavor) -> None:
    gpu = visible_gpu()
    if not options.capabilities and gpu is None:
        raise InputError(
            "this machine has no GPU to build for, and no compute capability was named",
            hint=f"type --compute-capability with one of {', '.join(flavor.capabilities)}; 8.9 is an RTX 4090 or L40S",
        )
    here = (gpu.capability,) if gpu else ()
    for capability in options.capabilities or here:
        _refuse_capability(capability, options, flavor)
    what = ""
    if options.version_compatible:
        what = "--version-compatible: it has no lean runtime, which version compatible engines contain"
    elif options.hardware_compatible != "none":
        what = "--hardware-compatible; type --compute-capability once for each GPU instead"
    elif options.timing_cache is not None:
        what = "--timing-cache: its builder times no kernels, so the cache would be empty"
    if what:
        raise InputError(f"tensorrt-rtx {flavor.version} does not support {what}")


def _refuse_capability(capability: str, options: BuildOptions, flavor: Flavor) -> None:
    if capability not in flavor.capabilities:
        others = ": Hopper and data-centre Blackwell need flavor tensorrt" if capability in ("9.0", "10.0") else ""
        raise InputError(
            f"tensorrt-rtx {flavor.version} does not build for compute capability {capability}{others}",
            hint=f"type --compute-capability with one of {', '.join(flavor.capabilities)}",
        )
    lowest = SPECS[options.precision].compute_capability
    if float(capability) < lowest:
        raise InputError(
            f"{options.precision} needs compute capability {lowest} or more, not {capability}",
            hint=f"type --precision fp16, or --compute-capability with {lowest} or more",
        )
    if capability == "7.5":
        raise InputError(
            "tensorrt-rtx compiles no float32 matrix product, such as the classifier head, for compute capability 7.5",
            hint="type --flavor tensorrt on a machine with such a GPU",
        )


def _refuse_tensorrt(options: BuildOptions, flavor: Flavor) -> None:
    gpu = visible_gpu()
    if gpu is None:
        raise InputError(
            f"tensorrt {flavor.version} builds on the GPU that will run the engine, but this machine has no GPU",
            hint="type --flavor tensorrt-rtx --compute-capability 8.9 to build without a GPU",
        )
    if options.capabilities and set(options.capabilities) != {gpu.capability}:
        raise InputError(
            f"tensorrt builds only for this machine's GPU, {gpu.name} of compute capability {gpu.capability}, "
            f"not for {', '.join(options.capabilities)}",
            hint="leave out --compute-capability, or type --hardware-compatible ampere+",
        )
    lowest = SPECS[options.precision].compute_capability
    if float(gpu.capability) < lowest:
        raise InputError(
            f"{options.precision} needs compute capability {lowest} or more; {gpu.name} has {gpu.capability}"
        )
    if float(gpu.capability) < 8.0 and options.hardware_compatible == "ampere+":
        raise InputError(f"--hardware-compatible ampere+ needs an Ampere GPU or later; {gpu.name} has {gpu.capability}")
