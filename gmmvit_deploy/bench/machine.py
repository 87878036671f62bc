"""Describe the machine of a run, and measure how much other programs use the machine."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gmmvit_deploy.inference.cores import cores, cpu_features, cpu_flags, cpu_name, cpu_quota

_LOOK_S = 0.5
_GPU_FORGETS_S = 1.0
_SPIN = 2000
_BLOCK = b"\0" * 4096
_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "LD_PRELOAD",
    # these limit the instructions of our kernels, of oneDNN (OpenVINO and PyTorch), and of PyTorch
    "GMMVIT_CPU_ISA",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
)
"""Variables of the environment that change how fast a program runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """The state of a GPU.  used: the share of the last second in which a kernel ran."""

    megahertz: float
    used: float
    celsius: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineState:
    """The state of the machine while this process is idle.

    load: the load average of the last minute.
    others, stolen: the shares of the time of all cores that other programs use, and that the hypervisor takes.
    spin_ms: the fastest of several runs of a fixed computation on a core, which shows the actual clock rate.
    megahertz: the clock rate of each core as the processor reports it; empty if it reports none.
    """

    load: float
    others: float
    stolen: float
    spin_ms: float
    megahertz: tuple[float, ...]
    gpus: tuple[GpuState, ...] = ()


def machine_state() -> MachineState:
    """Measure the state of the machine for half a second, and wait before for a GPU, which reports the last second."""
    if shutil.which("nvidia-smi") is not None:
        time.sleep(_GPU_FORGETS_S)
    before = _processor_times()
    time.sleep(_LOOK_S)
    after = _processor_times()
    total = max(sum(after.values()) - sum(before.values()), 1e-9)
    idle = sum(after.get(key, 0) - before.get(key, 0) for key in ("idle", "iowait"))
    stolen = after.get("steal", 0) - before.get("steal", 0)
    return MachineState(
        load=os.getloadavg()[0],
        others=max(0.0, (total - idle - stolen) / total),
        stolen=stolen / total,
        spin_ms=_spin(),
        megahertz=tuple(
            float(line.partition(":")[2])
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("cpu MHz")
        ),
        gpus=_gpu_states(),
    )


def describe_machine() -> dict[str, Any]:
    """Return the properties of the machine that do not change during a run."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "cores_allowed": cores(),
        "cpu_quota": cpu_quota(),
        # Choices are of a processor's features without amx_int8, which every processor with amx_tile has.
        "features": [*cpu_features(), *({"amx_int8"} & set(cpu_flags() or ()))],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "gpus": gpu_names(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def gpu_names() -> list[str]:
    """Return the name, driver, clock limit and power limit of each NVIDIA GPU, or an empty list without nvidia-smi."""
    return _asked_of_gpus("name,driver_version,clocks.max.sm,power.limit", "csv,noheader")


def _gpu_states() -> tuple[GpuState, ...]:
    lines = _asked_of_gpus("clocks.sm,utilization.gpu,temperature.gpu", "csv,noheader,nounits")
    try:
        rows = [[float(part) for part in line.split(",")] for line in lines]
    except ValueError:  # nvidia-smi prints words such as "N/A" for a value that a GPU does not report
        return ()
    return tuple(GpuState(megahertz=clock, used=used / 100, celsius=heat) for clock, used, heat in rows)


def _asked_of_gpus(what: str, form: str) -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={what}", f"--format={form}"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def _processor_times() -> dict[str, float]:
    first, _ = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    return dict(zip(names, map(float, first.split()[1:9]), strict=False))


def _spin() -> float:
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        digest = hashlib.sha256()
        for _ in range(_SPIN):
            digest.update(_BLOCK)
        best = min(best, time.perf_counter() - start)
    return best * 1e3
