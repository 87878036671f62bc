"""CPU, memory, instances and threads of a pod, which agree, from the measurement of ``gmmvit tune``.

cpu             = instances · threads + 1           the last core is for HAProxy, preprocessing and Triton itself
shared memory   = 3 · in flight · largest request   HTTP, gRPC and images, each with its own requests in flight
memory          = 1.25 · measured peak + shared memory + 256 MiB for HAProxy, the front and gmmvit serve
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.runtimes.runners.names import runner_from
from gmmvit_deploy.serving.gateway.options import DEFAULT_IN_FLIGHT, DEFAULT_QUEUE_TIMEOUT_MS
from gmmvit_deploy.serving.served_models import Tuned

_MIB = 2**20
_PART_MIB = 64
_BESIDE_MIB = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The best settings that ``gmmvit tune`` measured.

    settings: fields of `RepositoryOptions`, but for runner and threads.  threads: of each instance.
    peak_bytes: memory of the server.
    """

    runner: RunnerName
    settings: Mapping[str, Any]
    instances: int
    threads: int
    tuned: Tuned
    peak_bytes: int


def measurement_from_file(file: Path, bundle: str, *, use: str) -> Measurement:
    """Read a file of ``gmmvit tune``.

    bundle: the SHA-256 of the bundle; a measurement of another bundle is refused.  use: of the bundle, for the message.
    Errors: InputError when the file has another form or is of another bundle.
    """
    measure_again = "type gmmvit tune BUNDLE --bound-ms MS to measure"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        best = data["best"]
        instances, threads = int(best["instances"]), int(best["threads"])
        cores = int(data["machine"]["cores_allowed"])
        measurement = Measurement(
            runner=runner_from(best["runner"]),
            settings={key: best[key] for key in ("backend", "max_queue_delay_us")},
            instances=instances,
            # 0 means a thread for each core of the machine that was measured, which a pod's limit does not change.
            threads=threads or max(1, cores // instances),
            tuned=Tuned(rate=float(data["rate"]), bound_ms=float(data["bound_ms"])),
            peak_bytes=int(data["peak_bytes"]),
        )
        measured = str(data["bundle"]["sha256"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, InputError) as exc:
        raise InputError(
            f"{file}: expected the file gmmvit_tuning.json of gmmvit tune; {exc!r}", hint=f"{measure_again} again"
        ) from exc
    if bundle and measured != bundle:
        raise InputError(
            f"{file}: measured with the bundle {measured[:16]}, but the bundle to {use} is {bundle[:16]}",
            hint=f"{measure_again} this bundle",
        )
    return measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a pod; cpu, memory, instances and threads are "" without a measurement.

    shm_mib: of /dev/shm, a part of the memory.  in_flight, queue_timeout_ms: as in `GatewaySettings`.
    runtimes: of the networks in the python backend; none for another backend.
    """

    shm_mib: int
    in_flight: int
    queue_timeout_ms: int
    runtimes: frozenset[str]
    cpu: str = ""
    memory: str = ""
    instances: str = ""
    threads: str = ""

    @property
    def known(self) -> bool:
        return bool(self.cpu)


def pod_sizes(measurement: Measurement | None, max_body_bytes: int, runtimes: frozenset[str]) -> Sizes:
    """Return the sizes.  runtimes: of the networks in the python backend; a measurement states its own."""
    in_flight = DEFAULT_IN_FLIGHT if measurement is None else measurement.tuned.in_flight
    shm_mib = _up(3 * in_flight * max_body_bytes / _MIB)
    if measurement is None:
        return Sizes(shm_mib=shm_mib, in_flight=in_flight, queue_timeout_ms=DEFAULT_QUEUE_TIMEOUT_MS, runtimes=runtimes)
    return Sizes(
        shm_mib=shm_mib,
        in_flight=in_flight,
        queue_timeout_ms=measurement.tuned.queue_timeout_ms,
        runtimes=frozenset([measurement.runner.runtime] if measurement.settings["backend"] == "python" else ()),
        cpu=str(measurement.instances * measurement.threads + 1),
        memory=f"{_up(1.25 * measurement.peak_bytes / _MIB + shm_mib + _BESIDE_MIB)}Mi",
        instances=str(measurement.instances),
        threads=str(measurement.threads),
    )


def _up(mib: float) -> int:
    return math.ceil(mib / _PART_MIB) * _PART_MIB
