"""The processes of a service: the workers of a server, read from /proc, and how often a process may end.

A worker is a process of Triton's Python backend, called a stub. Triton does not restart a stub that ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gmmvit_deploy.errors import ServerError

_LAUNCHER = Path(__file__).parents[1] / "files" / "_launch.py"
_STUB = "triton_python_b"  # Linux keeps 15 characters of triton_python_backend_stub
_TICKS = os.sysconf("SC_CLK_TCK")
_DEAD = "ZX"
_MAX_RESTARTS, _WINDOW_S = 5, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker process.

    model: the model that it runs.  started: clock ticks since boot, which distinguish processes with a reused PID.
    """

    pid: int
    model: str
    started: int


class _Stat(NamedTuple):
    """Fields of /proc/PID/stat.  cpu_ticks: time in user and kernel mode."""

    name: str
    state: str
    parent: int
    cpu_ticks: int
    started: int


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    before, _, after = text.rpartition(")")  # the name may have spaces and brackets
    fields = after.split()
    ticks = int(fields[11]) + int(fields[12])
    return _Stat(before.partition("(")[2], fields[0], int(fields[1]), ticks, int(fields[19]))


def workers_of(server: int) -> tuple[Worker, ...]:
    """Return the live workers of the server with the process ID ``server``."""
    workers = []
    for folder in Path("/proc").glob("[0-9]*"):
        stat = _stat(int(folder.name))
        if stat is not None and stat.parent == server and stat.name == _STUB and stat.state not in _DEAD:
            workers.append(Worker(pid=int(folder.name), model=_model(folder), started=stat.started))
    return tuple(sorted(workers, key=lambda worker: worker.pid))


def _model(folder: Path) -> str:
    """Return the model of a stub, whose first argument is .../MODEL/VERSION/model.py."""
    try:
        arguments = (folder / "cmdline").read_bytes().split(b"\0")
        return Path(os.fsdecode(arguments[1])).parents[1].name
    except (OSError, IndexError):
        return "?"


def is_alive(worker: Worker) -> bool:
    stat = _stat(worker.pid)
    return stat is not None and stat.state not in _DEAD and stat.started == worker.started


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the processor time that these processes have used, in seconds."""
    stats = [_stat(pid) for pid in pids]
    return sum(stat.cpu_ticks for stat in stats if stat is not None) / _TICKS


def peak_bytes(pids: tuple[int, ...]) -> int:
    """Return the sum of the largest resident sizes that these processes had, in bytes; 0 for one that has ended.

    Pages that processes share count once for each process, so the sum is an upper bound.
    """
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return total


def launched(command: Sequence[str | Path], *options: str, **how: Any) -> subprocess.Popen[str]:
    """Start a program that Linux ends when this thread ends.  Ctrl-C reaches only this process.

    options: of the launcher `_launch.py`.  how: as for `subprocess.Popen`.
    """
    launcher = [sys.executable, "-I", str(_LAUNCHER), *options, str(os.getpid())]
    return subprocess.Popen([*launcher, *map(str, command)], text=True, start_new_session=True, **how)


def described_end(status: int | None) -> str:
    """Return how a process ended, such as ``signal SIGKILL``.  status: as `subprocess.Popen.poll` returns it."""
    return f"exit status {status}" if status is None or status >= 0 else f"signal {signal.Signals(-status).name}"


def kill_group(leader: int) -> None:
    """Kill every process of a process group."""
    with contextlib.suppress(ProcessLookupError):  # the processes of the group may have ended already
        os.killpg(leader, signal.SIGKILL)


class Restarts:
    """Counts the restarts of a process, and allows five in a minute.  process: its name in the error."""

    def __init__(self, process: str) -> None:
        self.process, self.count = process, 0
        self._last: deque[float] = deque(maxlen=_MAX_RESTARTS)

    def add(self, why: str) -> None:
        """Count a restart.  Errors: ServerError, with ``why``, when the process ends again and again."""
        now = time.monotonic()
        if len(self._last) == _MAX_RESTARTS and now - self._last[0] < _WINDOW_S:
            raise ServerError(f"{self.process} ended {_MAX_RESTARTS + 1} times in a minute: {why}")
        self._last.append(now)
        self.count += 1
