"""Run a service as a process, and stop its processes while another service is measured."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

_POLL_S = 0.1
_EXIT_S = 20


class NotStarted(Exception):  # noqa: N818 - a reason that is listed
    """A service did not start.  The message is the reason."""


class Service:
    """A service, which runs inside ``with Service(…)``; whether it answers is for the caller to ask."""

    def __init__(
        self, command: Sequence[str], *, log: Path, folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=folder,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_until(self, ready: Callable[[], object], seconds: float) -> None:
        """Wait until ``ready()`` is true; errors of connections count as not ready.  Errors: NotStarted."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise NotStarted(f"ended with status {self._process.returncode}: {self._last_line()}")
            try:
                if ready():
                    return
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(_POLL_S)
        raise NotStarted(f"not ready after {seconds:.0f} s: {self._last_line()}")

    def pause(self) -> None:
        """Stop every process of the service: some services poll while nobody asks them."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the service and all of its processes."""
        if self._process.poll() is not None:
            return
        self.resume()
        own = _tree(self._process.pid)
        self._process.terminate()
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pid in own:
            _send(pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for pid in _tree(self._process.pid):
            _send(pid, number)

    def _last_line(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or ["no output"])[-1].strip()[:200]


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _tree(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
            except OSError:  # the process has ended
                continue
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(folder.name))
    found = [root]
    for pid in found:
        found += sorted(children.get(pid, []))
    return found
