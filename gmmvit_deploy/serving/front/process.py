"""Start and stop the front, the process that answers ``POST /classify`` and ``/embed``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import gmmvit_deploy
from gmmvit_deploy.errors import MissingDependencyError, ServerError
from gmmvit_deploy.serving._local_http import answers
from gmmvit_deploy.serving._metric_text import metric_text
from gmmvit_deploy.serving.front.options import CLASSIFY_PATH, READY_PATH, FrontOptions
from gmmvit_deploy.serving.gateway.options import Front
from gmmvit_deploy.serving.ports import listening_socket
from gmmvit_deploy.serving.processes import Restarts, launched

_HOST = "127.0.0.1"
_PACKAGES = ("starlette", "uvicorn", "uvloop", "httptools", "python_multipart")
_EXIT_TIMEOUT_S = 20  # longer than the front waits for the requests that it received
_EXIT_BEHIND_GATEWAY_S = 5  # the gateway has stopped before, so nobody waits for an answer
_POLL_S = 0.05


class FrontProcess:
    """A front on a loopback port, which is started again when it has ended.  Use it inside ``with FrontProcess(…):``.

    This process keeps the listening socket: while the front is started again, connections wait.
    Start it from a thread that lives as long as the service: Linux stops the front when this thread ends.
    """

    def __init__(
        self,
        options: FrontOptions | None,
        secret: str | None,
        *,
        listener: socket.socket | None = None,
        on_log_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        """options: None loads the program alone, which takes a second, and `serve` gives the options.
        secret: of the header `FRONT_HEADER`, which the gateway adds to each request; None: without a gateway.
        listener: the socket to listen on, which `stop` closes; None opens a free port of 127.0.0.1.
        on_log_line: called with a sentence when the front is started again.
        Errors: MissingDependencyError when a package of the extra ``serve`` is not installed.
        """
        for package in _PACKAGES:
            if find_spec(package) is None:
                raise MissingDependencyError(package.replace("_", "-"), extra="serve")
        self._options, self._secret, self._note = options, secret, on_log_line
        self._listener = listener or listening_socket(_HOST, 0, "HTTP endpoint")
        self._host, self.port = self._listener.getsockname()[:2]
        self._restarts = Restarts("the HTTP endpoint")
        self._start()

    def _start(self) -> None:
        self._process = launched(
            [sys.executable, "-m", f"{__package__}._app"],
            stdin=subprocess.PIPE,
            pass_fds=[self._listener.fileno()],
            cwd="/",  # so that no file of the user's folder is imported
            env={**os.environ, "PYTHONPATH": _import_path(), "PYTHONDONTWRITEBYTECODE": "1"},
        )
        if self._options is not None:
            self.serve(self._options)

    def serve(self, options: FrontOptions) -> None:
        """Answer requests with these options, once.  A front that is started again gets the same."""
        self._options = options
        settings = {"secret": self._secret, "socket": self._listener.fileno(), "options": asdict(options)}
        with contextlib.suppress(BrokenPipeError), self._process.stdin or contextlib.nullcontext() as stdin:
            if stdin is not None:
                stdin.write(json.dumps(settings) + "\n")

    @property
    def url(self) -> str:
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self.port}"

    @property
    def classify_url(self) -> str:
        return f"{self.url}{CLASSIFY_PATH}"

    @property
    def front(self) -> Front:
        """What the gateway must know about the front."""
        models = self._options.models if self._options is not None else ()
        return Front(port=self.port, secret=self._secret or "", models=models)

    @property
    def restarts(self) -> int:
        return self._restarts.count

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, or None while the front runs."""
        return self._process.poll()

    def step(self) -> None:
        """Start the front again if it has ended; call it often.  Errors: ServerError when it ends again and again."""
        status = self.poll()
        if status is None:
            return
        self._restarts.add(f"the last exit status is {status}")
        self._note(f"HTTP endpoint: ended with exit status {status}, and is started again")
        self._start()

    def metrics_text(self) -> str:
        """Return the number of restarts, in Prometheus's text format."""
        meaning = "Times that the front had ended and was started again"
        return metric_text("gmmvit_front_restarts_total", "counter", meaning, [("", self.restarts)])

    def ready(self) -> bool:
        """Return whether the front answers and its Triton server is ready."""
        return answers(f"{self.url}{READY_PATH}")

    def wait_ready(self, timeout_s: float = 30.0, *, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Wait until the front is ready or ``cancelled``.  Errors: ServerError when it ends, or is late."""
        deadline = time.monotonic() + timeout_s
        while not self.ready() and not cancelled():
            if self.poll() is not None:
                raise ServerError(f"the front did not start (exit status {self.poll()})")
            if time.monotonic() > deadline:
                raise ServerError(f"the front was not ready after {timeout_s:g} s")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Ask the front to stop, wait for its requests, and kill it after 20 s, behind a gateway after 5 s."""
        self._listener.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_EXIT_TIMEOUT_S if self._secret is None else _EXIT_BEHIND_GATEWAY_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill_now(self) -> None:
        """Kill the front at once, as a signal handler may; call `stop` afterwards."""
        self._process.kill()

    def __enter__(self) -> FrontProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _import_path() -> str:
    """Return the folder of this package, so that the front runs the same code, and the inherited folders."""
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(Path(gmmvit_deploy.__path__[0]).parent), *([inherited] if inherited else [])])
