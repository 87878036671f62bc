"""HAProxy as a program: locate it, check a configuration, run it, and send it commands."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.serving.processes import described_end, launched

INSTALL_HAPROXY = "apt-get install haproxy"
_OLDEST = (2, 6)
_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""With it, glibc returns the buffers of a burst of unfinished requests; else each burst kept up to 110 MB more."""
_LINES_KEPT = 100
_START_S, _END_S = 20.0, 1.0
_POLL_S = 0.05


def find_haproxy() -> Path:
    """Return the path of HAProxy on PATH, or in /usr/sbin, which is not on the PATH of every user.

    Errors: ServerError when HAProxy is not installed, or is older than 2.6.
    """
    needs = "the gateway needs HAProxy 2.6 or newer"
    on_path = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
    if on_path is None:
        raise ServerError(f"{needs}, and there is no haproxy on PATH", hint=INSTALL_HAPROXY)
    program = Path(on_path)
    version = haproxy_version(program)
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise ServerError(f"{needs}, got {version} ({program})", hint=INSTALL_HAPROXY)
    return program


def haproxy_version(program: Path) -> str:
    """Return the version of HAProxy, such as ``2.6.12``.  Errors: ServerError when the program does not run."""
    try:
        answer = subprocess.run([str(program), "-v"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as exc:
        raise ServerError(f"{program} does not run: {exc}", hint=INSTALL_HAPROXY) from exc
    match = re.search(r"version (\d+\.\d+\.\d+)", answer.stdout)
    if match is None:
        said = (answer.stdout + answer.stderr).strip()[:160]
        raise ServerError(f"{program} is not HAProxy: {said}", hint=INSTALL_HAPROXY)
    return match[1]


def check_config(program: Path, config: Path, *, sockets: Sequence[int] = ()) -> None:
    """Check a configuration, which names the descriptors ``sockets``.  Errors: ServerError with HAProxy's reasons."""
    answer = subprocess.run(
        [str(program), "-c", "-f", str(config)], capture_output=True, text=True, timeout=60, pass_fds=sockets
    )
    if answer.returncode != 0:
        reasons = [line for line in answer.stderr.splitlines() if "[ALERT]" in line or "[WARNING]" in line][:5]
        raise ServerError(
            f"{config}: HAProxy refuses this configuration:\n  " + "\n  ".join(reasons or answer.stderr.splitlines()),
            hint=f"type haproxy -c -f {config} to see all messages",
        )


class HAProxy:
    """A running HAProxy that ends with its parent.  `start` may be called again after the process has ended."""

    def __init__(
        self,
        program: Path,
        config: Path,
        *,
        socket_path: Path,
        passed: Sequence[int] = (),
        on_log_line: Callable[[str], None] | None = None,
    ) -> None:
        """passed: the file descriptors that the configuration names.  socket_path: of the socket for commands."""
        self._program, self._config, self._socket_path = program, config, socket_path
        self._passed = tuple(passed)
        self._on_log_line = on_log_line
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._leaving: list[subprocess.Popen[str]] = []

    @property
    def leaving(self) -> bool:
        """True while a process that handed over still has connections."""
        return any(process.poll() is None for process in self._leaving)

    @property
    def pid(self) -> int:
        """Process ID, or 0 before the start."""
        return self._process.pid if self._process is not None else 0

    @property
    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    @property
    def end(self) -> str:
        """How the process ended, such as ``signal SIGKILL``."""
        return described_end(None if self._process is None else self._process.poll())

    def start(self) -> None:
        """Start HAProxy, and wait until it answers.  Errors: ServerError."""
        check_config(self._program, self._config, sockets=self._passed)
        self._process = launched(
            [self._program, "-db", "-f", self._config],
            env={**_MEMORY, **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            errors="replace",
            pass_fds=self._passed,
        )
        self._reader = threading.Thread(target=self._read_log, args=(self._process,), daemon=True)
        self._reader.start()
        deadline = time.monotonic() + _START_S
        while not self.ended and time.monotonic() < deadline:
            with suppress(ServerError):  # until its socket is there, which a HAProxy before it may still have
                if f"Pid: {self.pid}" in self.command("show info").splitlines():
                    return
            time.sleep(0.02)
        raise ServerError(f"HAProxy did not start: {self.last_words()}")

    def _read_log(self, process: subprocess.Popen[str]) -> None:
        for line in process.stderr or ():
            self.add_line(line.rstrip("\n"))

    def add_line(self, line: str) -> None:
        """Keep a message of HAProxy, and pass it on.  Messages about each start and each end are left out."""
        if line.startswith("[NOTICE]") or "stopped (cumulated" in line or not line:
            return
        self._lines.append(line)
        if self._on_log_line is not None:
            try:
                self._on_log_line(f"HAProxy: {line}")
            except (OSError, ValueError):  # on_log_line prints to a closed pipe
                self._on_log_line = None

    def hand_over(self) -> None:
        """Let a new process with the configuration of now take over the listening sockets.

        The old process takes no new connection; it closes a connection with its next answer, and ends with its last
        connection or after 30 s.
        Errors: ServerError when the configuration is refused or the new process does not start; the old process goes
        on then.
        """
        old, reader = self._process, self._reader
        try:
            self.start()
        except ServerError:
            if self._process is not None and self._process is not old:
                self._process.kill()
            self._process, self._reader = old, reader
            raise
        self._leaving = [process for process in self._leaving if process.poll() is None]
        if old is not None:
            old.send_signal(signal.SIGUSR1)
            self._leaving.append(old)

    def last_words(self) -> str:
        return self._lines[-1] if self._lines else "HAProxy wrote no message"

    def stop(self, timeout_s: float) -> None:
        """Close the listeners, wait for requests in progress for at most ``timeout_s`` seconds, and end HAProxy."""
        process = self._process
        if process is None:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            # After SIGUSR1, HAProxy keeps an open connection to its socket, refuses new ones, and waits for it.
            connection.settimeout(10)
            connection.connect(str(self._socket_path))
            connection.sendall(b"prompt\n")
            _until_prompt(connection)
            process.send_signal(signal.SIGUSR1)
            _wait_idle(connection, timeout_s)
        for each in (process, *self._leaving):
            _end(each)
        self._process, self._leaving = None, []
        if self._reader is not None:
            self._reader.join(timeout=5)
            self._reader = None

    def kill_now(self) -> None:
        for process in (self._process, *self._leaving):
            if process is not None:
                process.kill()

    def command(self, text: str, *, payload: str = "") -> str:
        """Send a command to the socket of HAProxy, and return the answer.

        payload: lines that belong to the command, none of them empty.
        Errors: ServerError when HAProxy does not answer.
        """
        message = f"{text} <<\n{payload.strip()}\n\n" if payload else f"{text}\n"
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(10)
                connection.connect(str(self._socket_path))
                connection.sendall(message.encode())
                connection.shutdown(socket.SHUT_WR)
                pieces = []
                while piece := connection.recv(65536):
                    pieces.append(piece)
        except OSError as exc:
            raise ServerError(f"HAProxy does not answer on {self._socket_path}: {exc}") from exc
        return b"".join(pieces).decode(errors="replace").strip()


def _wait_idle(connection: socket.socket, timeout_s: float) -> None:
    """Wait until HAProxy has no request in progress, at two looks in sequence, or until the time is over."""
    deadline, looks = time.monotonic() + timeout_s, 0
    while looks < 2 and time.monotonic() < deadline:
        connection.sendall(b"show sess\n")
        streams = [line for line in _until_prompt(connection).splitlines() if line.startswith("0x")]
        # A connection between two requests has no stream; this connection has one.
        looks = 0 if any(" fe=GLOBAL " not in line for line in streams) else looks + 1
        time.sleep(_POLL_S)


def _until_prompt(connection: socket.socket) -> str:
    answer = b""
    while not answer.endswith(b"\n> "):
        piece = connection.recv(65536)
        if not piece:
            raise ConnectionError("HAProxy has ended")
        answer += piece
    return answer.decode(errors="replace")


def _end(process: subprocess.Popen[str]) -> None:
    """End a process that has no request in progress.  It ends by itself unless a client keeps a connection open."""
    for number in (0, signal.SIGTERM, signal.SIGKILL):
        process.send_signal(number)  # 0 is no signal
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            continue
        return
