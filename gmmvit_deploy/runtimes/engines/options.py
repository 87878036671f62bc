"""Options for building an engine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.inference.precision import Precision
from gmmvit_deploy.precision_names import precision_from

HardwareCompatibility = Literal["none", "ampere+", "same-cc"]
HARDWARE_COMPATIBILITIES: tuple[HardwareCompatibility, ...] = get_args(HardwareCompatibility)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """An optimisation profile: the smallest and the largest batch, and the batch that the builder optimises for."""

    minimum: int
    optimum: int
    maximum: int

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.optimum <= self.maximum:
            raise InputError(
                f"profile {self}: expected 1 ≤ MIN ≤ OPT ≤ MAX",
                hint="type --batch 1:8:64, or --batch 8 for a fixed batch size of 8",
            )

    def __str__(self) -> str:
        return f"{self.minimum}:{self.optimum}:{self.maximum}"


def profile_from(text: str) -> Profile:
    """Parse a profile such as ``1:8:64``, or ``8`` for batches of 8 images.  Errors: InputError on any other text."""
    if not re.fullmatch(r"\d+(:\d+:\d+)?", text):
        raise InputError(f"--batch: expected MIN:OPT:MAX, such as 1:8:64, or a single number, got {text!r}")
    numbers = [int(part) for part in text.split(":")]
    minimum, optimum, maximum = numbers if len(numbers) == 3 else numbers * 3
    return Profile(minimum=minimum, optimum=optimum, maximum=maximum)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Options for building an engine.

    profiles: ranges of batch sizes; a batch runs in the first range that contains its size. Empty selects a default.
    capabilities: the compute capabilities to build for, such as ``8.9``; empty builds for the GPU of this machine.
    optimization_level: 0 to 5; higher levels take longer to build. None uses the builder's default.
    timing_cache: the file with TensorRT's measured kernel times, which a build reads if it exists, and writes.
    version_compatible: later TensorRT versions with the same major version can load the engine.
    hardware_compatible: the GPUs that can run the engine: ``none``, only the GPU of the build; ``ampere+``, Ampere and
    later; ``same-cc``, those with the same compute capability.
    tf32: allow float32 matrix products to use TF32, which drops 13 bits of the inputs.
    workspace_mib: the GPU memory for temporary data; None allows all.
    require_fused: fail unless every attention is a single GPU kernel.
    require_precision: fail unless every matrix product runs in the data type that the precision promises.
    """

    precision: Precision = "fp16"
    profiles: tuple[Profile, ...] = ()
    capabilities: tuple[str, ...] = ()
    optimization_level: int | None = None
    timing_cache: Path | None = None
    version_compatible: bool = False
    hardware_compatible: HardwareCompatibility = "none"
    tf32: bool = False
    workspace_mib: int | None = None
    require_fused: bool = False
    require_precision: bool = False

    def __post_init__(self) -> None:
        precision_from(self.precision)
        if self.optimization_level is not None and not 0 <= self.optimization_level <= 5:
            raise InputError(f"optimization level: expected 0 to 5, got {self.optimization_level}")
        if self.hardware_compatible not in get_args(HardwareCompatibility):
            known = ", ".join(get_args(HardwareCompatibility))
            raise InputError(f"hardware compatibility {self.hardware_compatible!r} is not known", hint=f"use {known}")
        if self.workspace_mib is not None and self.workspace_mib < 1:
            raise InputError(f"workspace: expected at least 1 MiB, got {self.workspace_mib}")
        for capability in self.capabilities:
            if not re.fullmatch(r"\d+\.\d", capability):
                raise InputError(f"compute capability: expected a number such as 8.9, got {capability!r}")
        if len(set(self.capabilities)) != len(self.capabilities):
            raise InputError(f"compute capabilities: expected each at most once, got {', '.join(self.capabilities)}")
        if self.tf32 and self.precision != "fp32":
            raise InputError(
                f"--tf32 is only for precision fp32, got {self.precision}",
                hint="leave out --tf32, or type --precision fp32",
            )

    def flags(self) -> dict[str, object]:
        """Return the options that the engine's card records as ``flags``."""
        names = ("optimization_level", "version_compatible", "hardware_compatible", "tf32", "workspace_mib")
        cache = str(self.timing_cache) if self.timing_cache else None
        return {"timing_cache": cache, **{name: getattr(self, name) for name in names}}


_HARDWARE_FLAGS = {"ampere+": "ampere+", "same-cc": "sameComputeCapability"}


def trtexec_line(
    options: BuildOptions, profiles: tuple[Profile, ...], *, onnx: str, tensor: str, shape: tuple[int, ...], rtx: bool
) -> str:
    """Return the command line with which NVIDIA's tool builds the same engine without this package.

    tensor, shape: of the graph's input, without the batch.  rtx: for TensorRT for RTX, whose tool is ``tensorrt_rtx``.
    """
    parts = ["tensorrt_rtx" if rtx else "trtexec", f"--onnx={onnx}", "--saveEngine=model.plan"]
    if not rtx:
        parts.append("--stronglyTyped")
    dims = "x".join(map(str, shape))
    for number, profile in enumerate(profiles):
        if len(profiles) > 1:
            parts.append(f"--profile={number}")
        for name, batch in (("min", profile.minimum), ("opt", profile.optimum), ("max", profile.maximum)):
            parts.append(f"--{name}Shapes={tensor}:{batch}x{dims}")
    if options.capabilities and rtx:
        parts.append(f"--computeCapabilities={','.join(options.capabilities)}")
    if options.optimization_level is not None:
        parts.append(f"--builderOptimizationLevel={options.optimization_level}")
    if options.timing_cache is not None:
        parts.append(f"--timingCacheFile={options.timing_cache}")
    if options.version_compatible:
        parts.append("--versionCompatible")
    if options.hardware_compatible != "none":
        parts.append(f"--hardwareCompatibilityLevel={_HARDWARE_FLAGS[options.hardware_compatible]}")
    if not options.tf32:
        parts.append("--noTF32")
    if options.workspace_mib is not None:
        parts.append(f"--memPoolSize=workspace:{options.workspace_mib}MiB")
    parts.append("--profilingVerbosity=detailed")
    return " ".join(parts)
