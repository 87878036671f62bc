"""SIGTERM under load: what was read is answered, what comes later is refused with a status that clients retry."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc

from gmmvit_deploy.serving import draining
from gmmvit_deploy.serving.draining import _is_idle, _Traffic
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.conftest import FREE_PORTS
from tests.serving.commands import Serve
from tests.serving.gateways import BEARER, key_file, request, require_haproxy
from tests.serving.stand_in import MODEL, batches_begun, infer_body, write_stand_in
from tests.waiting import best_of, wait_until

pytestmark = pytest.mark.rest

KINDS = {"kept", "new", "grpc"}
PATH = f"/v2/models/{MODEL}/infer"


def traffic(**changes: int) -> _Traffic:
    values = {"sent_ms": 100, "received_ms": 100, "sent_bytes": 10, "received_bytes": 10, "unsent_bytes": 0}
    return _Traffic(**{**values, **changes})


@pytest.mark.parametrize(
    ("now", "before", "was_idle", "idle"),
    [
        (traffic(sent_ms=5, received_ms=9), None, None, True),
        (traffic(sent_ms=9, received_ms=5), None, None, False),
        (traffic(sent_ms=5, received_ms=9, unsent_bytes=1), None, None, False),
        (traffic(received_bytes=0, received_ms=10), None, None, False),
        (traffic(received_bytes=0, received_ms=1000), None, None, True),
        (traffic(), None, None, None),
        (traffic(sent_ms=6000, received_ms=6000), None, None, True),
        (traffic(sent_bytes=20), traffic(), None, True),
        (traffic(received_bytes=20), traffic(), True, False),
        (traffic(received_bytes=20, sent_bytes=20), traffic(), True, None),
        (traffic(), traffic(), True, True),
        (traffic(), traffic(), False, False),
    ],
)
def test_what_came_last_is_read_from_the_counters(
    now: _Traffic, before: _Traffic | None, was_idle: bool | None, idle: bool | None
) -> None:
    assert _is_idle(now, before, was_idle) is idle


class Clients:
    """Clients in threads, and what became of each of their requests: (time, outcome)."""

    def __init__(self, where: dict[str, str], headers: dict[str, str] | None = None) -> None:
        self._headers = headers or {}
        self._host, _, port = where["http"].removeprefix("http://").partition(":")
        self._port, self._grpc = int(port), where["grpc"].removeprefix("grpc://")
        self.outcomes: list[tuple[float, str, str]] = []
        self.done = threading.Event()
        self.threads: list[threading.Thread] = []

    def start(self, target: Callable[[], None], number: int) -> None:
        for _ in range(number):
            self.threads.append(threading.Thread(target=target))
            self.threads[-1].start()

    def wait_for_answers(self) -> None:
        """Wait until each kind of client has got an answer from now on."""
        since = time.monotonic()
        kinds = lambda: {kind for when, kind, outcome in self.outcomes if when > since and outcome == "200"}  # noqa: E731
        wait_until(lambda: kinds() >= KINDS, "an answer to each kind of client")

    def note(self, kind: str, outcome: str) -> None:
        self.outcomes.append((time.monotonic(), kind, outcome))

    def ask(self, connection: http.client.HTTPConnection, kind: str, value: float) -> bool:
        """Return whether the connection remains open."""
        try:
            connection.request("POST", PATH, infer_body(value), self._headers)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as exc:
            self.note(kind, type(exc).__name__)
            return False
        right = answer.status != 200 or json.loads(content)["outputs"][0]["data"] == [value]
        self.note(kind, str(answer.status) if right else "wrong")
        return not answer.will_close

    def kept(self) -> None:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=30)
        for value in range(100_000):
            if self.done.is_set():
                break
            if not self.ask(connection, "kept", float(value)):
                connection.close()
                time.sleep(0.05)
        connection.close()

    def new(self) -> None:
        for value in range(100_000):
            if self.done.is_set():
                break
            connection = http.client.HTTPConnection(self._host, self._port, timeout=30)
            self.ask(connection, "new", float(value))
            connection.close()
            time.sleep(0.02)

    def grpc(self) -> None:
        client = tritonclient.grpc.InferenceServerClient(self._grpc)
        headers = {name.lower(): value for name, value in self._headers.items()}
        tensor = tritonclient.grpc.InferInput("X", [1, 1], "FP32")
        for value in range(100_000):
            if self.done.is_set():
                break
            tensor.set_data_from_numpy(np.full((1, 1), value, np.float32))
            try:
                right = client.infer(MODEL, [tensor], headers=headers).as_numpy("Y").tolist() == [[float(value)]]
                self.note("grpc", "200" if right else "wrong")
            except tritonclient.utils.InferenceServerException as exc:
                self.note("grpc", str(exc.status()))
                time.sleep(0.05)
        client.close()


@contextmanager
def serving(models: Path, *arguments: str) -> Iterator[Serve]:
    running = Serve(models, *arguments)
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.communicate()


@pytest.mark.server
def test_sigterm_under_load(tmp_path: Path) -> None:
    drained_under_load_s(tmp_path)


@pytest.mark.alone
@pytest.mark.server
def test_sigterm_under_load_takes_seconds_and_clients_are_answered_to_the_end(tmp_path: Path) -> None:
    """The exit takes less than 10 s, and less than 3 s of them have no answer."""

    def share() -> float:
        exit_s, silent_s = drained_under_load_s(Path(tempfile.mkdtemp(dir=tmp_path)))
        return max(exit_s / 10, silent_s / 3)

    assert best_of(3, share, enough=1) < 1


def drained_under_load_s(folder: Path) -> tuple[float, float]:
    """End a server under load with SIGTERM; return the seconds of its exit, and those after the last answer."""
    models = write_stand_in(folder / "models", delay_s=0.02)
    with serving(models, "--log", str(folder / "log")) as running:
        return _drained_s(running)


def _drained_s(running: Serve) -> tuple[float, float]:
    clients = Clients(running.ready())
    idle = http.client.HTTPConnection(clients._host, clients._port, timeout=30)
    assert clients.ask(idle, "idle", 1.0)
    unused = socket.create_connection((clients._host, clients._port))
    for target, number in ((clients.kept, 4), (clients.new, 2), (clients.grpc, 2)):
        clients.start(target, number)
    wait_until(lambda: len(clients.outcomes) >= 100, "100 answers")
    began = time.monotonic()
    running.process.send_signal(signal.SIGTERM)
    status, errors = running.end(timeout_s=60)
    ended = time.monotonic()
    clients.done.set()
    for thread in clients.threads:
        thread.join(timeout=30)
    unused.close()
    idle.close()
    assert status == 0, errors
    http_outcomes = [(when, kind, outcome) for when, kind, outcome in clients.outcomes if kind != "grpc"]
    # After the last answer, the ports are closed.
    last = max(when for when, _, outcome in http_outcomes if outcome in ("200", "503"))
    assert {(kind, outcome) for when, kind, outcome in http_outcomes if when <= last} == {
        *((kind, outcome) for kind in ("kept", "new") for outcome in ("200", "503")),
        ("idle", "200"),
    }
    over_grpc = [outcome for _, kind, outcome in clients.outcomes if kind == "grpc"]
    assert set(over_grpc) == {"200", "StatusCode.UNAVAILABLE"}
    return ended - began, ended - last


@pytest.mark.server
def test_kill_and_sigterm_under_load_behind_the_gateway(tmp_path: Path) -> None:
    """A killed server is back. At SIGTERM, each request that HAProxy read reaches its client."""
    killed_and_drained_s(tmp_path)


@pytest.mark.alone
@pytest.mark.server
def test_behind_the_gateway_a_killed_server_is_back_and_haproxy_ends_within_seconds(tmp_path: Path) -> None:
    """Back within 10 s; and HAProxy ends within 5 s: alone, it would wait 10 s for a connection without a request."""

    def share() -> float:
        back_s, end_s = killed_and_drained_s(Path(tempfile.mkdtemp(dir=tmp_path)))
        return max(back_s / 10, end_s / 5)

    assert best_of(3, share, enough=1) < 1


def killed_and_drained_s(folder: Path) -> tuple[float, float]:
    """Kill a server under load, and end the service with SIGTERM.

    Returns the seconds until all clients have answers again, and those from SIGTERM to the end of HAProxy.
    """
    require_haproxy()
    models, log = write_stand_in(folder / "models", delay_s=0.02), folder / "access.log"
    gateway = ("--gateway", "--keys", str(key_file(folder)), "--allow-json", "10000", "--access-log", str(log))
    with serving(models, *gateway) as running:
        return _killed_and_drained_s(running, log)


def _killed_and_drained_s(running: Serve, log: Path) -> tuple[float, float]:
    where = running.ready()
    clients = Clients(where, BEARER)
    idle = http.client.HTTPConnection(clients._host, clients._port, timeout=30)
    assert clients.ask(idle, "idle", 1.0)
    unused = socket.create_connection((clients._host, clients._port))
    for target, number in ((clients.kept, 4), (clients.new, 2), (clients.grpc, 2)):
        clients.start(target, number)
    clients.wait_for_answers()
    os.kill(where["pid"], signal.SIGKILL)
    killed = time.monotonic()
    restarted = 'gmmvit_server_restarts_total{reason="exit"} 1'
    wait_until(lambda: restarted in request(where["metrics"], "/metrics").body.decode(), "a restart of the server")
    clients.wait_for_answers()
    began = time.monotonic()
    running.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not Path(f"/proc/{where['gateway_pid']}").exists(), "the end of HAProxy")
    haproxy_ended = time.monotonic()
    status, errors = running.end(timeout_s=60)
    clients.done.set()
    for thread in clients.threads:
        thread.join(timeout=30)
    assert status == 0, errors
    assert idle.sock is not None
    assert idle.sock.recv(100) == b""
    idle.close()
    unused.close()
    later = [(kind, outcome) for when, kind, outcome in clients.outcomes if when > began]
    # HAProxy may close a kept connection in the moment in which the client sends on it: it does not read that request.
    closed = {"RemoteDisconnected", "ConnectionResetError", "BrokenPipeError"}
    assert {outcome for kind, outcome in later if kind == "new"} <= {"200", "ConnectionRefusedError", *closed}
    assert {outcome for kind, outcome in later if kind == "kept"} <= {"200", "ConnectionRefusedError", *closed}
    assert {outcome for kind, outcome in later if kind == "grpc"} <= {"200", "StatusCode.UNAVAILABLE"}
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    complete = Counter(line["protocol"] for line in lines if line["status"] == 200 and line["end"] == "--")
    answered = Counter(
        "grpc" if kind == "grpc" else "http" for _, kind, outcome in clients.outcomes if outcome == "200"
    )
    assert complete == answered
    return began - killed, haproxy_ended - began


@pytest.mark.server
def test_an_idle_connection_is_answered_at_the_exit(tmp_path: Path) -> None:
    exit_with_idle_connection_s(tmp_path)


@pytest.mark.alone
@pytest.mark.server
def test_an_idle_connection_does_not_hold_up_the_exit(tmp_path: Path) -> None:
    measure_s = lambda: exit_with_idle_connection_s(Path(tempfile.mkdtemp(dir=tmp_path)))  # noqa: E731
    assert best_of(3, measure_s, enough=10) < 10


def exit_with_idle_connection_s(folder: Path) -> float:
    models = write_stand_in(folder / "models")
    with TritonServer(models, options=ServerOptions(**FREE_PORTS)) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)
        connection.request("GET", "/v2/health/ready")
        connection.getresponse().read()
        began = time.monotonic()
    seconds = time.monotonic() - began
    assert connection.sock is not None
    assert connection.sock.recv(100).startswith(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n")
    connection.close()
    return seconds


WITHOUT_PIDFD_GETFD = """
import ctypes, errno, os, resource, struct, sys
resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, 16 << 20))
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, GETFD = 38, 22, 2, 438
program = b"".join(struct.pack("HBBI", *line) for line in (
    (0x20, 0, 0, 0),  # load the number of the system call
    (0x15, 0, 1, GETFD),
    (0x06, 0, 0, 0x00050000 | errno.EPERM),  # SECCOMP_RET_ERRNO
    (0x06, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
))
held = ctypes.create_string_buffer(program)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
rules = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(held))
assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, rules, 0, 0) == 0, os.strerror(ctypes.get_errno())
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Runs Python as in some containers: Linux refuses pidfd_getfd(2) with EPERM, and the stack has a hard limit."""


@pytest.mark.server
def test_what_a_container_forbids_is_in_the_log(tmp_path: Path) -> None:
    """Where the sockets are not accessible, requests that were read are answered all the same."""
    models = write_stand_in(tmp_path / "models", delay_s=0.5)
    log = tmp_path / "log"
    running = Serve(models, "--log", str(log), before=(sys.executable, "-c", WITHOUT_PIDFD_GETFD))
    clients = Clients(running.ready())
    thread = threading.Thread(target=clients.grpc)
    thread.start()
    wait_until(lambda: clients.outcomes, "an answer")
    before = batches_begun(models)
    wait_until(lambda: batches_begun(models) > before, "the next request is in the server")
    running.process.send_signal(signal.SIGTERM)
    signalled = time.monotonic()
    status, errors = running.end(timeout_s=60)
    clients.done.set()
    thread.join(timeout=30)
    assert status == 0, errors
    assert "Traceback" not in errors
    assert "the sockets of the server are not accessible (Operation not permitted)" in log.read_text()
    assert f"the hard limit of the stack is {16 << 20} bytes, expected {1 << 30}" in log.read_text()
    assert {outcome for _, _, outcome in clients.outcomes} <= {"200", "StatusCode.UNAVAILABLE", "StatusCode.NOT_FOUND"}
    assert next(outcome for when, _, outcome in clients.outcomes if when > signalled) == "200"


def test_the_filter_drops_what_a_client_sends_and_nothing_else() -> None:
    """The other end still reads what is sent, and the client's data arrives once the filter is removed."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        own, _ = listener.accept()
        with own:
            own.settimeout(5)
            client.settimeout(5)
            draining._attach(own, draining._ATTACH_FILTER, draining._NO_PAYLOAD)
            client.sendall(b"request")
            own.sendall(b"answer")
            assert client.recv(100) == b"answer"
            own.setblocking(False)
            with pytest.raises(BlockingIOError):
                own.recv(100)
            own.setsockopt(socket.SOL_SOCKET, draining._DETACH_FILTER, 0)
            own.settimeout(5)
            assert own.recv(100) == b"request"
