"""Start and stop the front, the process that answers ``POST /classify``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import gmmvit_deploy
from gmmvit_deploy.errors import InputError, ServerError
from gmmvit_deploy.extras import require
from gmmvit_deploy.serving.front.options import READY_PATH, FrontOptions
from gmmvit_deploy.serving.local_http import answers
from gmmvit_deploy.serving.ports import listening_socket

__all__ = ["FrontProcess", "start_front"]

_HOST = "127.0.0.1"
_LAUNCHER = Path(gmmvit_deploy.__path__[0]) / "files" / "_launch.py"
_PACKAGES = ("starlette", "uvicorn", "tritonclient", "python_multipart")
_EXIT_TIMEOUT_S = 5  # the gateway has stopped before, so nobody waits for an answer
_POLL_S = 0.05
_BACKLOG = 128


class FrontProcess:
    """A front that runs on a loopback port.  Inside ``with start_front(…) as front:`` the front runs.

    port: the port on 127.0.0.1.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._process = process
        self.port = port

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, or None while the front runs."""
        return self._process.poll()

    def ready(self) -> bool:
        """Return whether the front answers and its Triton server is ready."""
        return answers(f"{self.url}{READY_PATH}", timeout_s=5)

    def wait_ready(self, timeout_s: float = 30.0, *, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Wait until the front is ready, or until ``cancelled`` returns True.

        Errors: ServerError when the front ends, or is not ready in time.
        """
        deadline = time.monotonic() + timeout_s
        while not self.ready() and not cancelled():
            if self.poll() is not None:
                raise ServerError(f"the front did not start (exit status {self.poll()})")
            if time.monotonic() > deadline:
                raise ServerError(f"the front was not ready after {timeout_s:g} s")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Ask the front to stop, wait for the requests that it received, and kill it after 5 s."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> FrontProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start_front(options: FrontOptions, secret: str, *, port: int = 0) -> FrontProcess:
    """Start the front as a process of its own on a loopback port.

    Start the front from the main thread: Linux stops the front when the thread that started it ends.
    secret: the value of the header `FRONT_HEADER`, which the gateway adds to each request.
    port: the port to listen on; 0 means any free port.
    Errors:
        InputError: the secret is empty.
        MissingDependencyError: a package of the extra ``serve`` is not installed.
        ServerError: the port cannot be opened.
    """
    if not secret:
        raise InputError("front: expected a secret, got an empty text")
    for package in _PACKAGES:
        require(package, package=package.replace("_", "-"), extra="serve")
    with listening_socket(_HOST, port, "front", backlog=_BACKLOG) as listening:
        settings = {"secret": secret, "socket": listening.fileno(), "options": options.to_json()}
        process = subprocess.Popen(
            # The front runs in the root folder, so that no file of the user's folder is imported.
            [sys.executable, "-I", str(_LAUNCHER), str(os.getpid()), sys.executable, "-m", f"{__package__}.main"],
            stdin=subprocess.PIPE,
            pass_fds=[listening.fileno()],
            cwd="/",
            env={**os.environ, "PYTHONPATH": _import_path(), "PYTHONDONTWRITEBYTECODE": "1"},
            start_new_session=True,  # Ctrl-C reaches only this process, which then stops the front
        )
        address = listening.getsockname()
    with contextlib.suppress(BrokenPipeError), process.stdin or contextlib.nullcontext() as stdin:
        if stdin is not None:
            stdin.write(json.dumps(settings).encode() + b"\n")
    return FrontProcess(process, address[1])


def _import_path() -> str:
    """Return the folder of this package, so that the front runs the same code, and the inherited folders."""
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(Path(gmmvit_deploy.__path__[0]).parent), *([inherited] if inherited else [])])
