"""Measure the distance between two cores: the round trip of a cache line between them, in ns.

A virtual machine's cores may share a cache and a second later lie on two chips. Data that they share then takes
longer to move, and no other reading available to a program shows it.

    python -m gmmvit_deploy.bench.core_to_core
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

__all__ = ["FAR", "round_trip_ns"]

FAR = 2.0
"""Cores are far apart if the round trip takes more than this many times the shortest of a run. On the machine of the
results it takes 50 to 65 ns or 320 to 350 ns, and rarely a time between."""

_SOURCE = Path(__file__).with_suffix(".c")
_ROUND_TRIPS = 10_000  # 1 to 4 ms


def round_trip_ns() -> float | None:
    """Return the shortest of three round trips between the first two cores that this process may use, in ns.

    Returns None with a single core, or without a C compiler (``$CXX``, by default c++).
    """
    cores = sorted(os.sched_getaffinity(0))
    measure = _measure()
    if measure is None or len(cores) < 2:
        return None
    least = min(measure(cores[0], cores[1], _ROUND_TRIPS) for _ in range(3))
    return least if least > 0 else None


@lru_cache
def _measure() -> Callable[[int, int, int], float] | None:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / "core_to_core.so"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    command = [*compiler, "-x", "c", "-O2", "-pthread", "-shared", "-fPIC", str(_SOURCE), "-o", str(library)]
    try:
        subprocess.run(command, check=True, capture_output=True)
        measure = ctypes.CDLL(str(library)).round_trip_ns
    except (OSError, subprocess.CalledProcessError):
        return None
    measure.argtypes, measure.restype = [ctypes.c_int] * 3, ctypes.c_double
    return measure


if __name__ == "__main__":
    measured_ns = round_trip_ns()
    print("a single core, or no C compiler" if measured_ns is None else f"{measured_ns:.0f} ns")
