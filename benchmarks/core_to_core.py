"""How far apart are two cores?  The round trip of one cache line between them, in ns.

A virtual machine's cores may share a cache now and lie on two chips a minute later. Then whatever they share takes
longer, and nothing else that a program can read tells of it.

    python benchmarks/core_to_core.py
"""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

__all__ = ["round_trip_ns"]

_SOURCE = Path(__file__).with_suffix(".c")
_SECONDS_AT_MOST = 20.0


def round_trip_ns() -> float | None:
    """The least of three, of the first two cores that this process may run on; None with one core, or no compiler."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    program = _program()
    if program is None or len(cores) < 2:
        return None
    command = [str(program), *(str(core) for core in cores)]
    try:
        runs = [subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS_AT_MOST) for _ in range(3)]
    except (OSError, subprocess.SubprocessError):
        return None
    return min(float(run.stdout) for run in runs)


@lru_cache
def _program() -> Path | None:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    command = [*compiler, "-x", "c", "-O2", "-pthread", str(_SOURCE), "-o", str(folder / "core_to_core")]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return folder / "core_to_core"


if __name__ == "__main__":
    found = round_trip_ns()
    print("one core, or no compiler" if found is None else f"{found:.0f} ns")
