"""CPU, memory, instances and threads of a pod, which agree, from the measurement of ``gmmvit tune``.

cpu             = instances · threads + 1           the last core is for HAProxy, preprocessing and Triton itself
shared memory   = 3 · in flight · largest request   HTTP, gRPC and images, each with its own requests in flight
memory          = 1.25 · measured peak + shared memory + 256 MiB for HAProxy, the front and gmmvit serve
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.serving.model_configs import usual_runtime
from gmmvit_deploy.serving.served_models import Tuned

__all__ = ["FILL_IN", "Sizes", "sizes_from_tuning", "unknown_sizes"]

FILL_IN = "FILL_IN"
"""Stands where a value was not measured. Kubernetes refuses it as a quantity."""
_MIB = 2**20
_PART_MIB = 64
_BESIDE_MIB = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a pod; cpu, memory, instances and threads are `FILL_IN` without a measurement.

    shm_mib: of /dev/shm, a part of the memory.  in_flight, queue_timeout_ms: as in `GatewaySettings`.
    rate: images a second within the limit of the latency, or 0 without a measurement.  runtime: of the network.
    """

    cpu: str
    memory: str
    instances: str
    threads: str
    shm_mib: int
    in_flight: int
    queue_timeout_ms: int
    rate: float = 0.0
    runtime: str = "onnxruntime"

    @property
    def known(self) -> bool:
        return self.cpu != FILL_IN


def _up(mib: float) -> int:
    return math.ceil(mib / _PART_MIB) * _PART_MIB


def _shm_mib(in_flight: int, max_body_bytes: int) -> int:
    return _up(3 * in_flight * max_body_bytes / _MIB)


def unknown_sizes(max_body_bytes: int, runtimes: frozenset[str] = frozenset()) -> Sizes:
    """Return the sizes without a measurement: the operator must fill in cpu, memory, instances and threads.

    runtimes: those of a repository; empty for a bundle.
    """
    return Sizes(
        cpu=FILL_IN,
        memory=FILL_IN,
        instances=FILL_IN,
        threads=FILL_IN,
        shm_mib=_shm_mib(16, max_body_bytes),
        in_flight=16,
        queue_timeout_ms=250,
        runtime=next(iter(runtimes)) if len(runtimes) == 1 else usual_runtime("python", "fp32"),
    )


def sizes_from_tuning(file: Path, bundle: str, max_body_bytes: int) -> Sizes:
    """Read the sizes from a file of ``gmmvit tune``.

    bundle: the SHA-256 of the bundle to serve; a measurement of another bundle is refused.
    Errors: InputError when the file has another form or is of another bundle.
    """
    data = _read(file)
    try:
        best = data["best"]
        instances, threads = int(best["instances"]), int(best["threads"])
        cores = int(data["machine"]["cores_allowed"])
        tuned = Tuned(rate=float(data["rate"]), bound_ms=float(data["bound_ms"]))
        runtime = str(best["runtime"])
        peak_mib = int(data["peak_bytes"]) / _MIB
        measured = str(data["bundle"]["sha256"])
    except (KeyError, TypeError, ValueError) as exc:
        raise InputError(
            f"{file}: expected a measurement of gmmvit tune with memory, threads and machine; {exc!r}",
            hint="type gmmvit tune BUNDLE --bound-ms MS to measure again",
        ) from exc
    if bundle and measured != bundle:
        raise InputError(
            f"{file}: measured with the bundle {measured[:16]}, but the bundle to serve is {bundle[:16]}",
            hint="type gmmvit tune BUNDLE --bound-ms MS to measure this bundle",
        )
    threads = threads or max(1, cores // instances)  # 0 means a thread for each core of the machine that was measured
    shm_mib = _shm_mib(tuned.in_flight, max_body_bytes)
    return Sizes(
        cpu=str(instances * threads + 1),
        memory=f"{_up(1.25 * peak_mib + shm_mib + _BESIDE_MIB)}Mi",
        instances=str(instances),
        threads=str(threads),
        shm_mib=shm_mib,
        in_flight=tuned.in_flight,
        queue_timeout_ms=max(1, round(tuned.bound_ms)),
        rate=tuned.rate,
        runtime=runtime,
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise InputError(
            f"{file}: expected the file gmmvit_tuning.json of gmmvit tune, got other content or no file",
            hint="type gmmvit tune BUNDLE --bound-ms MS, which writes it into the repository",
        ) from exc
    if not isinstance(data, dict):
        raise InputError(f"{file}: expected the file gmmvit_tuning.json of gmmvit tune, got other JSON")
    return data
