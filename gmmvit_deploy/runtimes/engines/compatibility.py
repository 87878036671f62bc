"""Check if a server or this machine can load a plan, and explain what to build if it cannot.

A plan is the file that TensorRT loads. A plan loads only in the TensorRT version that built the plan. A version
compatible plan also loads in later versions with the same major version. Triton's tensorrt backend loads plans that
TensorRT built, and no plans that TensorRT for RTX built.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.runtimes.engines.releases import RELEASES

if TYPE_CHECKING:
    from gmmvit_deploy.runtimes.engines.card import EngineCard
    from gmmvit_deploy.runtimes.engines.flavors import Gpu

_FIND_OUT = (
    "type --server-tensorrt VERSION; on the server, dpkg -l | grep -E 'libnvinfer-lean|tensorrt' shows the version"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTensorRT:
    """The TensorRT version of a server, such as ``10.9.0`` or ``10.9``.  name: of the server, for messages."""

    name: str
    version: str


def server_tensorrt(
    *, release: str | None = None, triton: str | None = None, tensorrt: str | None = None, name: str = ""
) -> ServerTensorRT:
    """Find the TensorRT version of a server from ``tensorrt``, or else ``release``, or else ``triton``.

    release: of NVIDIA's Triton container, such as ``25.04``.  triton: the version that a running server reports.
    Errors: InputError when the version is malformed or not known, or when none is given.
    """
    if tensorrt is not None:
        if not re.fullmatch(r"\d+(\.\d+){1,3}", tensorrt):
            raise InputError(f"--server-tensorrt: expected a version such as 10.9.0, got {tensorrt!r}")
        return ServerTensorRT(name=name or f"a server with TensorRT {tensorrt}", version=tensorrt)
    if release is not None:
        known = {of: version for of, (_, version) in RELEASES.items() if version}
        if release not in known:
            raise InputError(
                f"the TensorRT of Triton {release} is not known; known are {', '.join(known)}", hint=_FIND_OUT
            )
        return ServerTensorRT(name=name or f"Triton {release}", version=known[release])
    if triton is not None:
        for known_release, (triton_version, tensorrt_version) in RELEASES.items():
            if triton_version == triton and tensorrt_version:
                return ServerTensorRT(name=name or f"Triton {triton} ({known_release})", version=tensorrt_version)
        raise InputError(
            f"{name or 'the server'}: the TensorRT version of Triton {triton} is not known", hint=_FIND_OUT
        )
    raise InputError(
        "a plan loads only in the TensorRT version that built it, and the server's TensorRT version is not known",
        hint="type --server-version 25.04 for NVIDIA's container, --server URL for a live server, "
        "or --server-tensorrt 10.9.0",
    )


def loads_in(card: EngineCard, version: str) -> str:
    """Return the reason why a TensorRT version cannot load the plan; empty if it can.

    version: the version of the card's flavor, which is TensorRT or TensorRT for RTX.
    """
    built, there = _numbers(card.tensorrt_version), _numbers(version)
    length = min(len(built), len(there))
    if built[:length] == there[:length]:
        return ""
    if card.flags["version_compatible"]:
        if built[0] == there[0] and there[1:length] >= built[1:length]:
            return ""
        return (
            f"the plan was built version compatible by {card.flavor} {card.tensorrt_version}; "
            f"expected {card.flavor} {card.tensorrt_version} or a later {built[0]}.x to load the plan, got {version}"
        )
    return (
        f"the plan was built by {card.flavor} {card.tensorrt_version}; "
        f"expected the same version to load the plan, got {version}"
    )


def runs_on(card: EngineCard, gpu: Gpu) -> str:
    """Return the reason why a GPU cannot run the engine; empty if the GPU can."""
    if card.flags["hardware_compatible"] == "ampere+" and float(gpu.capability) >= 8.0:
        return ""
    capabilities = card.target["capabilities"]
    if gpu.capability in capabilities:
        return ""
    return f"the engine was built for compute capability {', '.join(capabilities)}; {gpu.name} has {gpu.capability}"


def loads_on(card: EngineCard, server: ServerTensorRT) -> str:
    """Return the reason why the server cannot load the plan, and what to do; empty if the server can."""
    if card.flavor != "tensorrt":
        return (
            f"the plan was built by {card.flavor}, and Triton's tensorrt backend loads only plans of tensorrt; "
            "type gmmvit build BUNDLE --flavor tensorrt on the server's GPU"
        )
    reason = loads_in(card, server.version)
    if not reason:
        return ""
    return (
        f"{reason} on {server.name}; build the engine again with tensorrt {server.version}, "
        "or with --version-compatible"
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:4])
