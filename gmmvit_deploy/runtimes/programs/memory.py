"""Read how much memory this process can still get, and return memory that it no longer needs.

What it can get is the smaller of what is free on the machine, and in the cgroups of the process:

    cgroup v2    memory.max               bytes, or "max"; memory.current; inactive_file in memory.stat
    cgroup v1    memory.limit_in_bytes    bytes; memory.usage_in_bytes; total_inactive_file in memory.stat

The kernel frees the memory of cached files (inactive_file) before it kills a process.
"""

from __future__ import annotations

import gc
import re
from pathlib import Path

from gmmvit_deploy.inference.cores import groups, lines
from gmmvit_deploy.inference.large_images import return_memory

_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the number of bytes that this process can still get, or None if the system does not state it.

    root: the folder with ``proc`` and ``sys``; tests give other folders.
    """
    machine = "\n".join(lines(root / "proc/meminfo"))
    stated = [int(kib) * 1024 for kib in re.findall(r"^(?:MemAvailable|SwapFree): +(\d+) kB", machine, re.MULTILINE)]
    free = [sum(stated)] if stated else []
    for folder in groups(root, "memory"):
        for limit, used, cached in _FILES:
            sizes = ["".join(lines(folder / name)) for name in (limit, used)]
            if all(size.isdigit() for size in sizes):
                held = re.search(rf"^{cached} (\d+)$", "\n".join(lines(folder / "memory.stat")), re.MULTILINE)
                free.append(int(sizes[0]) - int(sizes[1]) + (int(held[1]) if held else 0))
    return min(free, default=None)


def release_memory() -> None:
    """Return the memory of unused objects to the system: after ONNX Runtime closes, twice that of the weights."""
    gc.collect()
    return_memory()
