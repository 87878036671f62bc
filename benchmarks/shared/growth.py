"""Sample memory and open descriptors of the processes of a service, and fit how much they grow.

    y_k = a + b · t_k + e_k     y_k: the mean of block k of the samples, t_k: its mean time; least squares
    growth = b · T              T: the time from the first to the last sample

The interval is that of b with 95 % confidence (Student's t, blocks − 2 degrees of freedom); neighbouring samples are
not independent, means of blocks nearly are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
from scipy import stats

from tests.serving.commands import kinds_of, memory_mib

BLOCKS = 12
MEMORY_LIMIT, MEMORY_SHARE = 8.0, 0.05
"""Memory may grow by 8 MiB or by 5 % of its mean during the measured time, whichever is more."""
DESCRIPTOR_LIMIT = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The growth of a quantity during the measured time, with its interval.  mean: of all ``samples``."""

    mean: float
    growth: float
    low: float
    high: float
    limit: float
    samples: int


@dataclass
class Sampler:
    """Samples the processes below ``pid`` in a thread of its own, while the context is active.

    Results: ``times`` in seconds; ``memory`` in MiB and ``descriptors`` by kind; ``processes``: kind → all process IDs.
    """

    pid: int
    interval_s: float = 5.0
    times: list[float] = field(default_factory=list)
    memory: dict[str, list[float]] = field(default_factory=dict)
    descriptors: dict[str, list[float]] = field(default_factory=dict)
    processes: dict[str, set[int]] = field(default_factory=dict)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Sampler:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=60)

    def _run(self) -> None:
        while True:
            self.sample()
            if self._ended.wait(self.interval_s):
                return

    def sample(self) -> None:
        """Take a sample of every process; a process that ends meanwhile is left out."""
        sums: dict[str, tuple[float, float]] = {}
        now = time.monotonic()
        for pid, kind in kinds_of(self.pid).items():
            try:
                mebibytes, opened = memory_mib(pid), len(list(Path(f"/proc/{pid}/fd").iterdir()))
            except OSError:
                continue
            before = sums.get(kind, (0.0, 0.0))
            sums[kind] = before[0] + mebibytes, before[1] + opened
            self.processes.setdefault(kind, set()).add(pid)
        for kind in sums.keys() | self.memory.keys():
            for series, value in zip((self.memory, self.descriptors), sums.get(kind, (0.0, 0.0)), strict=True):
                # Zeros for the time before the process: a process that starts late is growth.
                series.setdefault(kind, [0.0] * len(self.times)).append(value)
        self.times.append(now)

    def growths(self, *, after: float) -> dict[str, dict[str, Growth]]:
        """Return kind of process → ``memory_mib`` and ``descriptors`` → growth since the time ``after``."""
        kept = [index for index, moment in enumerate(self.times) if moment >= after]
        times = [self.times[index] for index in kept]
        result = {}
        for kind in sorted(self.memory):
            memory = [self.memory[kind][index] for index in kept]
            descriptors = [self.descriptors[kind][index] for index in kept]
            allowed = max(MEMORY_LIMIT, MEMORY_SHARE * float(np.mean(memory)))
            result[kind] = {
                "memory_mib": fitted(times, memory, limit=allowed),
                "descriptors": fitted(times, descriptors, limit=DESCRIPTOR_LIMIT),
            }
        return result


def fitted(times: Sequence[float], values: Sequence[float], *, limit: float) -> Growth:
    """Fit the growth of ``values`` from the first to the last time.  Errors: ValueError below 12 samples."""
    if len(values) < BLOCKS:
        raise ValueError(f"expected at least {BLOCKS} samples, got {len(values)}")
    t = np.array([block.mean() for block in np.array_split(np.asarray(times, np.float64), BLOCKS)])
    y = np.array([block.mean() for block in np.array_split(np.asarray(values, np.float64), BLOCKS)])
    fit = stats.linregress(t, y)
    span = times[-1] - times[0]
    # A constant series has no residuals, and scipy's standard error of its slope is NaN.
    half = float(stats.t.ppf(0.975, BLOCKS - 2) * fit.stderr) * span if np.ptp(y) > 0 else 0.0
    growth = float(fit.slope) * span
    return Growth(
        mean=float(np.mean(values)),
        growth=growth,
        low=growth - half,
        high=growth + half,
        limit=limit,
        samples=len(values),
    )


def grown(growths: Mapping[str, Mapping[str, Growth]]) -> list[str]:
    """Return a sentence for each quantity whose growth is not shown to be within its limit."""
    return [
        f"{kind}: {name} grew by {each.growth:.1f} ({each.low:.1f} to {each.high:.1f}), expected at most "
        f"{each.limit:.1f} with 95 % confidence"
        for kind, quantities in growths.items()
        for name, each in quantities.items()
        if not each.high <= each.limit
    ]
