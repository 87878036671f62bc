"""Count the cores that this process may use, the smaller of its affinity and the quota of its cgroup, and name them.

A container with a quota of 2 cores on a machine with 64 cores sees all 64. With 64 threads, it would use up its quota
in a thirty-second of each period, and then stand still until the next period.

    cgroup v2    cpu.max            "QUOTA PERIOD" or "max PERIOD", in µs
    cgroup v1    cpu.cfs_quota_us   -1 without a quota;  cpu.cfs_period_us

A quota of a parent group holds for all groups below it, so the smallest quota of the path counts.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, MutableMapping
from pathlib import Path

_ROOT = Path("/")
_CPUINFO = Path("/proc/cpuinfo")
_PRODUCT_FLAGS = (
    "fma",
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
)
_LIBRARY_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # PyTorch, MKL and scikit-learn; NumPy


def cores(root: Path = _ROOT) -> int:
    """Return the number of cores that this process may use, at least 1.

    A quota with a fraction is rounded down: with more threads than the quota allows, the kernel stops the process for
    the rest of each period, and requests wait.
    root: the folder with ``proc`` and ``sys``; tests give other folders.
    """
    quota = cpu_quota(root)
    allowed = len(allowed_processors())
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def allowed_processors() -> tuple[int, ...]:
    """Return the numbers of the processors of this process's affinity, in ascending order."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def is_limited(root: Path = _ROOT) -> bool:
    """Return True if the quota allows fewer cores than the affinity."""
    return cores(root) < len(allowed_processors())


def cores_in_words(root: Path = _ROOT) -> str:
    """Return the number of cores, and what limits it: ``2 of 64 cores, quota of the cgroup: 2.5``."""
    count, present, quota = cores(root), os.cpu_count() or 1, cpu_quota(root)
    words = f"{count} cores" if count == present else f"{count} of {present} cores"
    return words if quota is None else f"{words}, quota of the cgroup: {quota:g}"


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Return the smallest quota of the cgroups of this process, in cores, or None without a quota."""
    quotas = [quota for folder in groups(root) if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def limit_libraries(environment: MutableMapping[str, str], root: Path = _ROOT) -> None:
    """State the number of cores in the variables that numerical libraries read when they are loaded.

    These libraries count the cores of the affinity themselves. Without a quota below the affinity, nothing changes, and
    a variable that the user has set is kept. Child processes inherit the variables.
    """
    if is_limited(root):
        for name in _LIBRARY_VARIABLES:
            environment.setdefault(name, str(cores(root)))


def groups(root: Path, controller: str = "cpu") -> Iterator[Path]:
    """Yield the folder of each cgroup that may limit this process: from its own group up to the mounted root.

    controller: ``cpu`` or ``memory``.
    """
    paths = _group_paths(root, controller)
    for line in lines(root / "proc/self/mountinfo"):
        fields, _, rest = line.partition(" - ")
        system, _, options = [*rest.split(" ", 2), "", ""][:3]
        version = "2" if system == "cgroup2" else "1" if system == "cgroup" and controller in options.split(",") else ""
        if version not in paths:
            continue
        top, mounted = (_unescaped(field) for field in fields.split(" ")[3:5])
        mount = root / mounted.lstrip("/")
        inside = _inside(paths[version], top)
        folder = mount / inside
        while True:
            yield folder
            if folder == mount or mount not in folder.parents:
                break
            folder = folder.parent


def _group_paths(root: Path, controller: str) -> dict[str, str]:
    """Return version of the hierarchy ("1" or "2") → path of this process's group in it."""
    paths = {}
    for line in lines(root / "proc/self/cgroup"):  # number:controllers:path
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths["2"] = path
        elif controller in controllers.split(","):
            paths["1"] = path
    return paths


def _inside(path: str, top: str) -> str:
    """Return a group's path relative to the mounted root ``top``; "" if the mount does not show the group."""
    parts, above = [[part for part in text.split("/") if part] for text in (path, top)]
    if ".." in parts or parts[: len(above)] != above:
        return ""
    return "/".join(parts[len(above) :])


def _quota(folder: Path) -> float | None:
    """Return the quota of a group in cores, or None if the group states none."""
    if stated := " ".join(lines(folder / "cpu.max")).split():
        quota, period = [*stated, "100000"][:2]
    else:
        quota, period = ("".join(lines(folder / name)) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    if not (quota.isdigit() and period.isdigit() and int(quota) and int(period)):  # "max", "-1", or no file
        return None
    return int(quota) / int(period)


def cpu_name() -> str:
    names = (line.partition(":")[2].strip() for line in lines(_CPUINFO) if line.startswith("model name"))
    return next(names, platform.processor())


def cpu_features() -> list[str]:
    """Return the processor's vector and matrix extensions, on which the speed of matrix products depends."""
    present = cpu_flags() or []
    return [flag for flag in _PRODUCT_FLAGS if flag in present]


def cpu_flags(cpuinfo: Path = _CPUINFO) -> list[str] | None:
    """Return the processor's flags; None if the file has no line of flags, as on ARM, or cannot be read."""
    return next((line.partition(":")[2].split() for line in lines(cpuinfo) if line.startswith("flags")), None)


def has_vnni(cpuinfo: Path = _CPUINFO) -> bool | None:
    """Return whether this CPU multiplies int8 values into 32 bits; None if ``/proc/cpuinfo`` does not say."""
    flags = cpu_flags(cpuinfo)
    return None if flags is None else not {"avx512_vnni", "avx_vnni"}.isdisjoint(flags)


def int8_saturates(cpuinfo: Path = _CPUINFO) -> str:
    """Return why sums of int8 products may saturate on this CPU; empty if they cannot, or if this is not known.

    Without VNNI, runtimes on x86-64 usually multiply int8 values with ``vpmaddubsw``, which adds two products in 16
    bits. A sum beyond ±32767 saturates, and the logits are wrong although the graph is right. ONNX Runtime has a
    setting against it (`onnxruntime_program`), OpenVINO has none.
    """
    if has_vnni(cpuinfo) is not False:
        return ""
    return "this CPU has no VNNI, so pairs of int8 products are added in 16 bits, which can saturate"


def lines(path: Path) -> list[str]:
    """Return the lines of a file of the kernel; an empty list if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _unescaped(field: str) -> str:
    r"""Replace the octal escapes of /proc/self/mountinfo, such as ``\040`` for a space."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
