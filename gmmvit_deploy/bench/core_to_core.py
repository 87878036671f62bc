"""Measure the distance between two cores: the time of a cache line's round trip between the cores, in ns.

A hypervisor may move the cores of a virtual machine between chips at any time. Moving a cache line between two cores
on different chips takes longer. A program inside the virtual machine sees the chips only in the time of a round trip.

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

from gmmvit_deploy.runtime.cores import allowed_processors

__all__ = ["FAR", "round_trip_ns"]

FAR = 2.0
"""Cores are far apart if the round trip takes more than `FAR` times the shortest round trip of the run. On the machine
of the committed results, a round trip takes 50 to 65 ns or 320 to 350 ns, and rarely a time between these ranges."""

_SOURCE = Path(__file__).with_suffix(".c")
_ROUND_TRIPS = 10_000  # these round trips take 1 to 4 ms together


def round_trip_ns() -> float | None:
    """Return the time of a round trip between the first two cores that this process may use, in ns.

    The time is the smallest result of three measurements.
    Returns None if this process may use only a single core, or if the C compiler (``$CXX``, by default ``c++``) fails.
    """
    processors = allowed_processors()
    measure = _measure()
    if measure is None or len(processors) < 2:
        return None
    least = min(measure(processors[0], processors[1], _ROUND_TRIPS) for _ in range(3))
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
    missing = "not measured: this process has a single core, or there is no C compiler"
    print(missing if measured_ns is None else f"{measured_ns:.0f} ns")
