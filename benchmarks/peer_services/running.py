"""Run a service as a process, and stop its processes while another service is measured."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.serving.commands import kinds_of

_POLL_S = 0.1
_EXIT_S = 20


class NotStarted(Exception):  # noqa: N818 - a reason that is listed
    """A service did not start.  The message is the reason."""


class Service:
    """A service that runs; whether it answers is for the caller to ask.  log: the file of its output."""

    def __init__(self, process: subprocess.Popen[Any], log: Path) -> None:
        self._process, self._log = process, log

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
        own = kinds_of(self._process.pid)
        self._process.terminate()
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pid in own:
            _send(pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for pid in kinds_of(self._process.pid):
            _send(pid, number)

    def _last_line(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or ["no output"])[-1].strip()[:200]


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
