"""Run a Triton server as a child process: start and stop the server, keep the log, and remove temporary files."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from gmmvit_deploy.bundle.artifacts import GOLDEN_FILE
from gmmvit_deploy.errors import RepositoryError, ServerError
from gmmvit_deploy.files.leftovers import new_run_folder, remove_run_folder
from gmmvit_deploy.inference.reference_outputs import wrong_in_batch
from gmmvit_deploy.runtimes.programs.onnxruntime import require_onnxruntime
from gmmvit_deploy.runtimes.programs.triton import TritonConnection
from gmmvit_deploy.serving._local_http import answers, text_from_url
from gmmvit_deploy.serving.installs import ServerInstall, find_server, stage_backends
from gmmvit_deploy.serving.ports import free_ports
from gmmvit_deploy.serving.processes import Worker, described_end, is_alive, kill_group, launched, workers_of
from gmmvit_deploy.serving.served_models import ServedModels, read_models
from gmmvit_deploy.serving.server_log import ServerLog

ADMIN_HEADER = "x-gmmvit-admin"
"""The HTTP header of `ServerOptions.admin_secret`; in gRPC, the metadata ``triton-grpc-protocol-x-gmmvit-admin``."""
_ADMIN_APIS = "model-repository,shared-memory,trace,logging"
"""Interfaces that always need a secret: without a gateway, every page in a browser of this machine can ask a server."""
_STACK_BYTES = 1 << 30
"""Triton reads nested JSON and chunked bodies by recursion; with 8 MiB, a request of 277 bytes ends the server."""
_MEMORY = {"MALLOC_ARENA_MAX": "2"}
"""With an arena for each of some threads, glibc kept 24 MB more after each 600 hostile requests."""
_PORT_TAKEN = "already in use"  # in Triton's message
_POLL_S = 0.05
_EXIT_S = 5  # what Triton needs to end beyond its exit timeout
_FLUSH_S = 0.2
"""The time in which the server sends the answers of completed requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of a server.

    host: the address to listen on. With any address other than loopback, other machines can send requests.
    http_port, grpc_port, metrics_port: 0 means any free port.  metrics_host: None means ``host``.
    start_timeout_s: until every model is ready.  exit_timeout_s: for requests in flight when the server stops.
    log_path: the file to which the server's log is appended; None writes no file.
    admin_secret: requests to the server's interfaces for logging, trace, shared memory, statistics and the model
    repository must have this value, of letters, digits, - and _, in the header `ADMIN_HEADER`. With None, these
    interfaces are closed, and statistics are open. Every user of this machine can read the secret in the server's
    command line.
    extra_arguments: more arguments of ``tritonserver``.
    """

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    metrics_host: str | None = None
    start_timeout_s: float = 120.0
    exit_timeout_s: int = 15
    log_path: Path | None = None
    admin_secret: str | None = field(default=None, repr=False)
    extra_arguments: tuple[str, ...] = ()


class TritonServer:
    """A Triton server.  Inside ``with TritonServer(repository) as server:`` every model is ready.

    Start the server from the main thread: Linux stops the server when the thread that started it ends.
    """

    def __init__(
        self,
        repository: Path,
        *,
        install: ServerInstall | None = None,
        options: ServerOptions | None = None,
        on_log_line: Callable[[str], None] | None = None,
        removed: Callable[[Mapping[str, str]], bool] = lambda failed: False,
    ) -> None:
        """removed: called with model → why it cannot be loaded; returns True if it took away these models, so that the
        server starts again with the others.
        """
        self.repository = repository
        self.install = install or find_server()
        self.options = options or ServerOptions()
        self._log = ServerLog(on_log_line)
        self._removed = removed
        self._process: subprocess.Popen[str] | None = None
        self._runtime: tuple[Path, int] | None = None  # the temporary folder, and the descriptor of its lock
        self._reader: threading.Thread | None = None
        self.http_port = self.grpc_port = self.metrics_port = 0
        self.workers: tuple[Worker, ...] = ()
        """The worker processes that ran when the server was ready."""

    @property
    def http_url(self) -> str:
        return f"http://{self.options.host}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"grpc://{self.options.host}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self.options.metrics_host or self.options.host}:{self.metrics_port}/metrics"

    def version(self) -> str:
        """Return the version of the running server, such as ``2.51.0``.  Errors: ServerError."""
        try:
            return str(json.loads(text_from_url(f"{self.http_url}/v2"))["version"])
        except (OSError, http.client.HTTPException, ValueError, KeyError) as exc:
            raise ServerError(f"the server at {self.http_url} does not state its version: {exc}") from exc

    @property
    def pid(self) -> int:
        """Process ID of ``tritonserver``, or 0 if the server is not running."""
        return self._process.pid if self._process is not None else 0

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @cached_property
    def models(self) -> ServedModels:
        """What the repository states.  Errors: RepositoryError when the folder is not a model repository."""
        return read_models(self.repository)

    def check_repository(self) -> None:
        """Raise RepositoryError if the folder is not a model repository, or needs a backend that is not here."""
        if self.install.kind == "wheel" and "onnxruntime" in self.models.runtimes:  # with the packages of this Python
            require_onnxruntime()
        for model, backend in self.models.backends.items():
            if backend not in self.install.backend_names:
                there = ", ".join(self.install.backend_names) or "no backend"
                raise RepositoryError(
                    f"{model} needs the {backend} backend; {self.install.binary} has: {there}",
                    hint="write the repository for another backend with gmmvit repository BUNDLE --backend NAME, or "
                    "add --tritonserver PATH to this command to use a server that has the required backend",
                )

    def start(self, *, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Start the server and wait until every model is ready, or until ``cancelled`` returns True.

        Errors, each of which leaves no process running:
            RepositoryError: the folder is not a model repository, or needs a backend that this server does not have.
            ServerError: a port is in use, a model fails to load, a model is not ready after ``start_timeout_s``, or a
            network gives other outputs than the reference outputs of its bundle.
            OutputError: the log file cannot be opened.
        """
        self.check_repository()
        try:
            self._log.open(self.options.log_path)
            self._start_with_what_loads(cancelled)
            if not cancelled():
                _require_right_networks(self.grpc_url, self.repository, self.models.limits)
        except BaseException:
            self.stop()
            raise

    def _start_with_what_loads(self, cancelled: Callable[[], bool]) -> None:
        while True:
            try:
                return self._start(cancelled)
            except ServerError as exc:
                options = self.options
                if _PORT_TAKEN in str(exc) and not (options.http_port or options.grpc_port or options.metrics_port):
                    self.http_port = self.grpc_port = self.metrics_port = 0  # another program was faster
                elif self._removed(self._log.not_loaded()):
                    self.__dict__.pop("models", None)  # read before
                else:
                    raise
                self.kill_now()
                self._clean_up()

    def _start(self, cancelled: Callable[[], bool]) -> None:
        options = self.options
        # A server that starts again keeps its ports, so that clients reach it at the same addresses.
        self.http_port, self.grpc_port, self.metrics_port = free_ports(
            {
                "HTTP": (options.host, self.http_port or options.http_port),
                "gRPC": (options.host, self.grpc_port or options.grpc_port),
                "metrics": (options.metrics_host or options.host, self.metrics_port or options.metrics_port),
            }
        )
        self._spawn()
        self._wait_ready(cancelled)
        self.workers = workers_of(self.pid)

    def restart(self, *, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Kill what is left, and start again on the same ports.  Errors: those of `start`; it may be called again."""
        self.kill_now()
        self._clean_up()
        self._start(cancelled)

    def require_running(self) -> None:
        """Errors: ServerError, with the signal or exit status, when the server has ended."""
        if self._process is None or self._process.poll() is not None:
            raise self._ended("ended unexpectedly")

    def note(self, text: str) -> None:
        """Add a line to the server's log."""
        self._log.note(text)

    def stop(self) -> None:
        """Complete the requests in progress, and remove all processes and temporary files.

        Meanwhile, Triton resets new HTTP connections and answers new gRPC requests with an error.
        """
        if self._process is not None and self._process.poll() is None:
            self._terminate(self._process)
        self.kill_now()
        self._clean_up()
        self._log.close()

    def _terminate(self, process: subprocess.Popen[str]) -> None:
        process.terminate()
        deadline = time.monotonic() + self.options.exit_timeout_s + _EXIT_S
        while process.poll() is None and time.monotonic() < deadline:
            if self._log.requests_completed:
                # The server unloads its models now, for seconds. A worker that decodes large images still answers.
                while time.monotonic() < deadline and any(map(is_alive, self.workers)):
                    time.sleep(_POLL_S)
                time.sleep(_FLUSH_S)
                return
            time.sleep(_POLL_S)

    def kill_now(self) -> None:
        """Kill the server at once, as a signal handler may; call `stop` afterwards."""
        if self._process is not None:
            # The stub processes of the Python backend belong to the server's process group and outlive a killed server.
            kill_group(self._process.pid)

    def _clean_up(self) -> None:
        """Wait for the killed process, and remove its temporary folder and shared memory."""
        if self._process is not None:
            self._process.wait()
            self._process = None
        if self._reader is not None:
            self._reader.join(timeout=5)
            self._reader = None
        if self._runtime is not None:
            remove_run_folder(*self._runtime)
            self._runtime = None

    def _command(self, backends: Path, prefix: str) -> list[str]:
        host, secret = self.options.host, self.options.admin_secret
        apis = f"{_ADMIN_APIS},statistics" if secret else _ADMIN_APIS
        rule = f"{apis}:{ADMIN_HEADER}={secret or secrets.token_hex(16)}"
        return [
            str(self.install.binary),
            f"--model-repository={self.repository}",
            f"--backend-directory={backends}",
            f"--backend-config=python,shm-region-prefix-name={prefix}",
            "--model-control-mode=none",
            "--disable-auto-complete-config",
            "--strict-readiness=true",
            f"--exit-timeout-secs={self.options.exit_timeout_s}",
            f"--http-address={host}",
            f"--http-port={self.http_port}",
            f"--grpc-address={host}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-address={self.options.metrics_host or host}",
            f"--metrics-port={self.metrics_port}",
            f"--http-restricted-api={rule}",
            f"--grpc-restricted-protocol={rule}",
            *self.options.extra_arguments,
        ]

    def _spawn(self) -> None:
        self._log.forget()
        self._runtime = folder, lock = new_run_folder("serve")
        command = self._command(stage_backends(self.install, folder), folder.name)
        self._process = launched(
            command,
            f"--stack-bytes={_STACK_BYTES}",
            env={**_MEMORY, **os.environ, **self.install.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            errors="replace",
            pass_fds=(lock,),  # the folder stays locked if the server outlives this process
        )
        self._reader = threading.Thread(target=self._log.read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def _wait_ready(self, cancelled: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.options.start_timeout_s
        while time.monotonic() < deadline and not cancelled():
            if self._process is None or self._process.poll() is not None:
                raise self._ended("did not start")
            if answers(f"{self.http_url}/v2/health/ready"):
                return
            time.sleep(_POLL_S)
        if cancelled():
            return
        raise ServerError(
            f"the server was not ready after {self.options.start_timeout_s:.0f} s; {self._log.last_words()}",
            hint="add --start-timeout 300 to wait longer, or --log FILE to keep the server's log",
        )

    def _ended(self, what: str) -> ServerError:
        self.kill_now()  # the stubs of a dead server hold its output open
        if self._reader is not None:
            self._reader.join(timeout=5)
        how = described_end(self._process.returncode if self._process is not None else None)
        causes = self._log.causes()
        detail = ":\n  " + "\n  ".join(causes) if causes else f"; {self._log.last_words()}"
        return ServerError(
            f"the Triton server {what} ({how}){detail}", hint="add --log FILE to keep the whole log of the server"
        )


def _require_right_networks(grpc_url: str, repository: Path, limits: Mapping[str, Mapping[str, float]]) -> None:
    """Compare the outputs of networks with the reference outputs, for an image alone and for the largest batch.

    The networks of the Python backend compare themselves when they are loaded; Triton's own backends cannot.
    """
    import numpy as np

    for network, of_outputs in limits.items():
        file = repository / network / "1" / GOLDEN_FILE
        try:
            with np.load(file, allow_pickle=False) as golden:
                inputs, expected = golden["inputs"], {output: golden[output] for output in of_outputs}
        except (OSError, ValueError, KeyError) as exc:
            raise RepositoryError(
                f"{file}: expected the reference outputs of {network}, got {exc}",
                hint="type gmmvit repository BUNDLE to write the repository again",
            ) from exc
        with TritonConnection(grpc_url) as connection:
            served = connection.model(network)
            (name,) = served.inputs
            answers = partial(connection.infer_all, network, name, outputs=tuple(of_outputs))
            for size in sorted({1, served.max_batch}):
                rows = {output: values[:size] for output, values in expected.items()}
                if problem := wrong_in_batch(answers, inputs[:size], rows, of_outputs, size):
                    raise ServerError(
                        f"{network} is wrong on this server: {problem}",
                        hint="type --runner with another runner, such as openvino or onnxruntime, which the Python "
                        "backend runs, or write the repository again",
                    )
