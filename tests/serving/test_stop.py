"""SIGTERM under load: requests that the service has read are answered, and it ends within seconds."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc

from tests.haproxy import needs_haproxy
from tests.serving.commands import Serve
from tests.serving.gateways import BEARER, key_file, request
from tests.serving.stand_in import MODEL, infer_body, write_stand_in
from tests.waiting import best_of, wait_until

pytestmark = pytest.mark.nightly

KINDS = {"kept", "new", "grpc"}
PATH = f"/v2/models/{MODEL}/infer"


class Clients:
    """Clients in threads, and what became of each of their requests: (time, outcome)."""

    def __init__(self, where: dict[str, str], headers: dict[str, str] | None = None) -> None:
        self._headers = headers or {}
        self._host, _, port = where["http"].removeprefix("http://").partition(":")
        self._port, self._grpc = int(port), where["grpc"].removeprefix("grpc://")
        self.outcomes: list[tuple[float, str, str]] = []
        self.done = threading.Event()
        self.threads: list[threading.Thread] = []

    def start(self) -> None:
        for kind in (*["kept"] * 4, *["new"] * 2):
            self.threads.append(threading.Thread(target=self.http, args=(kind,)))
        self.threads += [threading.Thread(target=self.grpc) for _ in range(2)]
        for thread in self.threads:
            thread.start()

    def end(self) -> None:
        self.done.set()
        for thread in self.threads:
            thread.join(timeout=30)

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

    def http(self, kind: str) -> None:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=30)
        for value in range(100_000):
            if self.done.is_set():
                break
            if not self.ask(connection, kind, float(value)) or kind == "new":
                connection.close()
                time.sleep(0.05 if kind == "kept" else 0.02)
        connection.close()

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


@pytest.mark.integration
def test_sigterm_under_load(tmp_path: Path) -> None:
    """A server without a gateway may refuse requests while it stops, and gives no wrong answer."""
    drained_under_load_s(tmp_path)


@pytest.mark.alone
@pytest.mark.integration
def test_sigterm_under_load_takes_seconds(tmp_path: Path) -> None:
    measure_s = lambda: drained_under_load_s(Path(tempfile.mkdtemp(dir=tmp_path)))  # noqa: E731
    assert best_of(3, measure_s, enough=25) < 25


def drained_under_load_s(folder: Path) -> float:
    """End a server under load with SIGTERM; return the seconds of its exit."""
    models = write_stand_in(folder / "models", delay_s=0.02)
    with Serve(models, "--log", str(folder / "log")) as running:
        clients = Clients(running.ready())
        clients.start()
        wait_until(lambda: len(clients.outcomes) >= 100, "100 answers")
        began = time.monotonic()
        running.process.send_signal(signal.SIGTERM)
        status, errors = running.end(timeout_s=60)
        ended = time.monotonic()
        clients.end()
        assert status == 0, errors
        assert {outcome for when, _, outcome in clients.outcomes if when <= began} == {"200"}
        refused = {"503", "ConnectionRefusedError", "ConnectionResetError", "RemoteDisconnected", "BrokenPipeError"}
        assert {outcome for _, kind, outcome in clients.outcomes if kind != "grpc"} <= {"200", *refused}
        over_grpc = {outcome for _, kind, outcome in clients.outcomes if kind == "grpc"}
        assert over_grpc <= {"200", "StatusCode.UNAVAILABLE", "StatusCode.NOT_FOUND"}
        return ended - began


@needs_haproxy
@pytest.mark.alone
@pytest.mark.integration
def test_behind_the_gateway_a_killed_server_is_back_and_haproxy_ends_within_seconds(tmp_path: Path) -> None:
    """At SIGTERM, each request that HAProxy read reaches its client.

    Back within 10 s; and HAProxy ends within 5 s: alone, it would wait 10 s for a connection without a request.
    """

    def share() -> float:
        back_s, end_s = killed_and_drained_s(Path(tempfile.mkdtemp(dir=tmp_path)))
        return max(back_s / 10, end_s / 5)

    assert best_of(3, share, enough=1) < 1


def killed_and_drained_s(folder: Path) -> tuple[float, float]:
    """Kill a server under load, and end the service with SIGTERM.

    Returns the seconds until all clients have answers again, and those from SIGTERM to the end of HAProxy.
    """
    models, log = write_stand_in(folder / "models", delay_s=0.02), folder / "access.log"
    gateway = ("--gateway", "--keys", str(key_file(folder)), "--allow-json", "10000", "--access-log", str(log))
    with Serve(models, *gateway) as running:
        where = running.ready()
        clients = Clients(where, BEARER)
        idle = http.client.HTTPConnection(clients._host, clients._port, timeout=30)
        assert clients.ask(idle, "idle", 1.0)
        unused = socket.create_connection((clients._host, clients._port))
        clients.start()
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
        clients.end()
        assert status == 0, errors
        assert idle.sock is not None
        assert idle.sock.recv(100) == b""
        idle.close()
        unused.close()
        later = [(kind, outcome) for when, kind, outcome in clients.outcomes if when > began]
        # HAProxy may close a connection in the moment in which the client sends on it: it does not read that request.
        closed = {"RemoteDisconnected", "ConnectionResetError", "BrokenPipeError"}
        assert {outcome for kind, outcome in later if kind != "grpc"} <= {"200", "ConnectionRefusedError", *closed}
        assert {outcome for kind, outcome in later if kind == "grpc"} <= {"200", "StatusCode.UNAVAILABLE"}
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        complete = Counter(line["protocol"] for line in lines if line["status"] == 200 and line["end"] == "--")
        answered = Counter(
            "grpc" if kind == "grpc" else "http" for _, kind, outcome in clients.outcomes if outcome == "200"
        )
        assert complete == answered
        return began - killed, haproxy_ended - began
