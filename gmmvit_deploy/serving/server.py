"""Run a Triton server as a child process: start and stop the server, keep the log, and remove temporary files."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TextIO

from gmmvit_deploy.errors import OutputError, RepositoryError, ServerError
from gmmvit_deploy.serving.installs import ServerInstall, find_server, stage_backends

__all__ = ["ServerOptions", "TritonServer"]

_LAUNCHER = Path(__file__).parents[1] / "_launch.py"
_POLL_S = 0.05
_LINES_KEPT = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of a server.

    host: the address to listen on. With any address other than loopback, other machines can send requests.
    http_port, grpc_port, metrics_port: the ports to listen on; 0 means any free port.
    start_timeout_s: the maximum time until every model is ready, in seconds.
    exit_timeout_s: the maximum time for requests in flight when the server stops, in seconds.
    log_path: the file to which the server's log is appended; None writes no file.
    extra_arguments: more arguments of ``tritonserver``.
    """

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    start_timeout_s: float = 120.0
    exit_timeout_s: int = 15
    log_path: Path | None = None
    extra_arguments: tuple[str, ...] = ()


class TritonServer:
    """A Triton server.  Inside ``with TritonServer(repository) as server:`` every model is ready.

    Start the server from the main thread. The launcher (`_launch.py`) makes Linux stop the server when the server's
    parent ends. For Linux, the parent is the thread that started the launcher.
    """

    def __init__(
        self,
        repository: Path,
        *,
        install: ServerInstall | None = None,
        options: ServerOptions | None = None,
        on_log_line: Callable[[str], None] | None = None,
    ) -> None:
        self.repository = repository
        self.install = install or find_server()
        self.options = options or ServerOptions()
        self._on_log_line = on_log_line
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._process: subprocess.Popen[str] | None = None
        self._runtime: Path | None = None
        self._reader: threading.Thread | None = None
        self.http_port = self.grpc_port = self.metrics_port = 0

    @property
    def http_url(self) -> str:
        return f"http://{self.options.host}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"grpc://{self.options.host}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self.options.host}:{self.metrics_port}/metrics"

    @property
    def pid(self) -> int:
        """Process ID of ``tritonserver``, or 0 if the server is not running."""
        return self._process.pid if self._process is not None else 0

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, *, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Start the server and wait until every model is ready, or until ``cancelled`` returns True.

        Errors, each of which leaves no process running:
            RepositoryError: the folder is not a model repository, or needs a backend that this server does not have.
            ServerError: a port is in use, a model fails to load, or a model is not ready after ``start_timeout_s``.
            OutputError: the log file cannot be opened.
        """
        _check_backends(self.repository, self.install)
        self.http_port, self.grpc_port, self.metrics_port = self._free_ports()
        self._runtime = Path(tempfile.mkdtemp(prefix="gmmvit-serve-"))
        try:
            self._spawn()
            self._wait_ready(cancelled)
        except BaseException:
            self.stop()
            raise

    def wait(self, poll: Callable[[], bool] = lambda: False) -> None:
        """Wait until ``poll`` returns True.  Errors: ServerError when the server ends during the wait."""
        while not poll():
            if self._process is None or self._process.poll() is not None:
                raise self._ended("ended unexpectedly")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Ask the server to stop, wait for requests in flight, and remove all processes and temporary files."""
        process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(self.options.exit_timeout_s + 5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            # The stub processes of the Python backend belong to the server's process group and outlive a killed server.
            _kill_group(process.pid)
            self._process = None
        if self._reader is not None:
            self._reader.join(timeout=5)
            self._reader = None
        if self._runtime is not None:
            for left in Path("/dev/shm").glob(f"{self._runtime.name}*"):  # noqa: S108 - Triton's own shared memory
                left.unlink(missing_ok=True)
            shutil.rmtree(self._runtime, ignore_errors=True)
            self._runtime = None

    def kill_now(self) -> None:
        """Kill the server at once.  A signal handler may call `kill_now`; call `stop` afterwards to clean up."""
        if self._process is not None:
            _kill_group(self._process.pid)

    def _free_ports(self) -> tuple[int, int, int]:
        ports = {
            "HTTP": self.options.http_port,
            "gRPC": self.options.grpc_port,
            "metrics": self.options.metrics_port,
        }
        taken: list[socket.socket] = []
        try:
            for service, port in ports.items():
                taken.append(_bound(self.options.host, port, service))
            http, grpc, metrics = (probe.getsockname()[1] for probe in taken)
        finally:
            for probe in taken:
                probe.close()
        return http, grpc, metrics

    def _command(self, backends: Path, prefix: str) -> list[str]:
        host = self.options.host
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
            f"--metrics-address={host}",
            f"--metrics-port={self.metrics_port}",
            *self.options.extra_arguments,
        ]

    def _spawn(self) -> None:
        if self._runtime is None:
            raise ServerError("the server has no temporary folder, because start() was not called")
        log = _opened_log(self.options.log_path)
        command = self._command(stage_backends(self.install, self._runtime), self._runtime.name)
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_LAUNCHER), str(os.getpid()), *command],
            env={**os.environ, **self.install.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches only this process, which then stops the server
        )
        self._reader = threading.Thread(target=self._read_log, args=(self._process, log), daemon=True)
        self._reader.start()

    def _read_log(self, process: subprocess.Popen[str], log: TextIO | None) -> None:
        """Read the server's output to its end, because the server would block on a full pipe."""
        sinks = [sink for sink in (self._on_log_line, _line_writer(log)) if sink is not None]
        for line in process.stdout or ():
            self._lines.append(line.rstrip("\n"))
            for sink in tuple(sinks):
                try:
                    sink(line.rstrip("\n"))
                except (OSError, ValueError):  # the disk of the log is full, or on_log_line prints to a closed pipe
                    sinks.remove(sink)
        if log is not None:
            with contextlib.suppress(OSError):
                log.close()

    def _wait_ready(self, cancelled: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.options.start_timeout_s
        while time.monotonic() < deadline and not cancelled():
            if self._process is None or self._process.poll() is not None:
                raise self._ended("did not start")
            if _is_ready(f"{self.http_url}/v2/health/ready"):
                return
            time.sleep(_POLL_S)
        if cancelled():
            return
        raise ServerError(
            f"the server was not ready after {self.options.start_timeout_s:.0f} s; {self._last_words()}",
            hint="add --start-timeout 300 to wait longer, or --log FILE to keep the server's log",
        )

    def _ended(self, what: str) -> ServerError:
        if self._reader is not None:
            self._reader.join(timeout=5)
        code = self._process.returncode if self._process is not None else None
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"
        causes = _causes(self._lines)
        detail = ":\n  " + "\n  ".join(causes) if causes else f"; {self._last_words()}"
        return ServerError(
            f"the Triton server {what} ({how}){detail}", hint="add --log FILE to keep the whole log of the server"
        )

    def _last_words(self) -> str:
        last = next((line.strip() for line in reversed(self._lines) if line.strip()), "")
        return f"the last line of the server's log: {last}" if last else "the server's log is empty"


def _opened_log(path: Path | None) -> TextIO | None:
    if path is None:
        return None
    try:
        return path.open("a", encoding="utf-8")
    except OSError as exc:
        raise OutputError(f"{path}: cannot open this file for the server's log: {exc.strerror}") from exc


def _line_writer(log: TextIO | None) -> Callable[[str], None] | None:
    if log is None:
        return None

    def write(line: str) -> None:
        log.write(line + "\n")
        log.flush()

    return write


# The server runs on this machine, so requests to the server must bypass a proxy that environment variables name.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _is_ready(url: str) -> bool:
    try:
        with _DIRECT.open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _bound(host: str, port: int, service: str) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ServerError(f"{service} port: expected a number from 0 to 65535, got {port}")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        probe = socket.socket(family, kind)
    except OSError as exc:
        raise ServerError(f"host {host}: the server cannot listen on this address: {exc.strerror or exc}") from exc
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen(1)
    except OSError as exc:
        probe.close()
        raise ServerError(
            f"{service} port {port} on {host} cannot be opened: {exc.strerror}",
            hint=f"stop the program that uses the port, or choose another port with --{service.lower()}-port; "
            "0 means any free port",
        ) from exc
    return probe


def _check_backends(repository: Path, install: ServerInstall) -> None:
    configs = sorted(repository.glob("*/config.pbtxt")) if repository.is_dir() else []
    if not configs:
        raise RepositoryError(
            f"{repository}: expected a Triton model repository, but there is no MODEL/config.pbtxt in this folder",
            hint="type gmmvit export CHECKPOINT -o BUNDLE to write a bundle, then gmmvit serve BUNDLE; or type gmmvit "
            "repository BUNDLE to write a repository",
        )
    for config in configs:
        match = re.search(r'^backend:\s*"(\w+)"', config.read_text(encoding="utf-8"), re.MULTILINE)
        if match and match.group(1) not in install.backend_names:
            there = ", ".join(install.backend_names) or "no backend"
            raise RepositoryError(
                f"{config.parent.name} needs the {match.group(1)} backend; {install.binary} has: {there}",
                hint="write the repository for another backend with gmmvit repository BUNDLE --backend NAME, or add "
                "--tritonserver PATH to this command to use a server that has the required backend",
            )


def _causes(lines: deque[str]) -> list[str]:
    """Return up to five reasons why the server ended, from Triton's log, without log prefixes and line breaks."""
    text = "\n".join(lines)
    failed = re.findall(r"failed to load '([^']+)' version \d+: (.*?)(?=\n[A-Z]\d{4} |\n\+|\Z)", text, re.DOTALL)
    causes = [f"{model}: {_one_line(why)}" for model, why in failed]
    causes += [_one_line(why) for why in re.findall(r"^error: (.*)$", text, re.MULTILINE)]
    causes += [_one_line(why) for why in re.findall(r"(failed to start \w+ service: .*)", text, re.IGNORECASE)]
    return list(dict.fromkeys(causes))[:5]


def _one_line(text: str) -> str:
    return " ".join(text.replace("\\n", " ").split())[:400].strip(' "')


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # the processes of the group may have ended already
        os.killpg(leader, signal.SIGKILL)
