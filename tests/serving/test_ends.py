"""The end of a service: under load, and before it has started."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.serving.gateway.options import GatewaySettings
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions
from gmmvit_deploy.serving.service import Service
from tests.conftest import FREE_PORTS
from tests.haproxy import needs_haproxy
from tests.inference.test_preprocess import encoded, photo
from tests.serving.commands import Serve, metric_values
from tests.serving.gateways import KEY, binary_request, key_file, request, running_service
from tests.serving.rollout.checked_load import ANSWERED, CheckedLoad
from tests.serving.stand_in import BUNDLE, NETWORK, SHAPE, answers_held, held_file, sleeping_repository
from tests.waiting import best_of, wait_until

pytestmark = pytest.mark.nightly

PATH = f"/v2/models/{NETWORK}/infer"
PIXELS = np.random.default_rng(0).integers(0, 256, (64, *SHAPE), dtype=np.uint8)


def load(where: dict[str, Any]) -> CheckedLoad:
    """Return clients that ask a `sleeping_repository` for more than it can answer."""
    logits = PIXELS.reshape(len(PIXELS), -1)[:, :10].astype(np.float32)
    return CheckedLoad(where["grpc"], where["http"], KEY, PIXELS, {BUNDLE: logits}, rate=200, clients=3)


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
    models = sleeping_repository(folder / "models")
    with Serve(models, "--log", str(folder / "log")) as running:
        with load(running.ready()) as clients:
            wait_until(lambda: len(clients.outcomes) >= 100, "100 answers")
            began = time.monotonic()
            running.process.send_signal(signal.SIGTERM)
            status, errors = running.end(timeout_s=60)
            ended = time.monotonic()
        assert status == 0, errors
        assert clients.wrong == []
        assert {outcome for when, _, outcome in clients.outcomes if when <= began} == {ANSWERED}
        refused = {"503", "ConnectionRefusedError", "ConnectionResetError", "RemoteDisconnected", "BrokenPipeError"}
        assert {outcome for _, kind, outcome in clients.outcomes if kind != "grpc"} <= {ANSWERED, *refused}
        over_grpc = {outcome for _, kind, outcome in clients.outcomes if kind == "grpc"}
        assert over_grpc <= {ANSWERED, "StatusCode.UNAVAILABLE", "StatusCode.NOT_FOUND"}
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
    models, log = sleeping_repository(folder / "models"), folder / "access.log"
    gateway = ("--gateway", "--keys", str(key_file(folder)), "--access-log", str(log))
    with Serve(models, *gateway) as running:
        where = running.ready()
        address = urlsplit(where["http"]).netloc
        idle = http.client.HTTPConnection(address, timeout=30)
        body, headers = binary_request("pixels", PIXELS[:1])
        assert request(where["http"], PATH, body, headers=headers, connection=idle).status == 200
        host, _, port = address.partition(":")
        unused = socket.create_connection((host, int(port)))
        with load(where) as clients:
            clients.await_answers()
            os.kill(where["pid"], signal.SIGKILL)
            killed = time.monotonic()
            restarts = lambda: metric_values(where["metrics"], "gmmvit_server_restarts_total")  # noqa: E731
            wait_until(lambda: restarts()['{reason="exit"}'] == 1, "a restart of the server")
            clients.await_answers()
            began = time.monotonic()
            running.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not Path(f"/proc/{where['gateway_pid']}").exists(), "the end of HAProxy")
            haproxy_ended = time.monotonic()
            status, errors = running.end(timeout_s=60)
        assert status == 0, errors
        assert clients.wrong == []
        assert idle.sock is not None
        assert idle.sock.recv(100) == b""
        idle.close()
        unused.close()
        later = [(kind, outcome) for when, kind, outcome in clients.outcomes if when > began]
        # HAProxy may close a connection in the moment in which the client sends on it: it does not read that request.
        closed = {"RemoteDisconnected", "ConnectionResetError", "BrokenPipeError"}
        assert {outcome for kind, outcome in later if kind != "grpc"} <= {ANSWERED, "ConnectionRefusedError", *closed}
        assert {outcome for kind, outcome in later if kind == "grpc"} <= {ANSWERED, "StatusCode.UNAVAILABLE"}
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        complete = Counter(line["protocol"] for line in lines if line["status"] == 200 and line["end"] == "--")
        answered = Counter(kind.partition("-")[0] for _, kind, outcome in clients.outcomes if outcome == ANSWERED)
        assert complete == answered + Counter(["http"])  # the idle connection's only request
        return began - killed, haproxy_ended - began


# ---- repositories that gmmvit serve does not write itself, behind a gateway ------------------------------------------


@pytest.mark.integration
@needs_haproxy
@pytest.mark.parametrize(("name", "normalised"), [("cifar", True), ("gmmvit", False)])
def test_the_front_asks_the_ensemble_of_the_repository_if_there_is_an_ensemble(
    name: str, normalised: bool, bundle: Bundle, tensor_bundles: dict[str, Bundle], tmp_path: Path
) -> None:
    served = bundle if normalised else tensor_bundles["vit_gmm"]
    repository = repository_from_bundle(served, tmp_path / "models", RepositoryOptions(name=name))
    lines: list[str] = []
    with running_service(repository.path, tmp_path, on_line=lines.append) as service:
        images = served.golden_set().images
        answer = request(
            service.http_url, "/classify", images[0] if images else b"image", headers={"Content-Type": "image/png"}
        )
    if normalised:
        assert (answer.status, answer.json()["model"]) == (200, name)
    else:
        assert answer.status == 404
        assert (
            "HTTP endpoint: POST /classify and /embed are not offered: no model of the repository takes encoded images"
            in lines
        )


def hold_answers(repository: Path) -> None:
    """Let the network of a repository wait inside ``with answers_held(repository):``."""
    program = repository / "gmmvit_network" / "1" / "model.py"
    old = "        answers: list[Any] = [None] * len(requests)\n"
    text = program.read_text()
    assert text.count(old) == 1
    wait = f"        while __import__('os').path.exists({str(held_file(repository))!r}):\n"
    program.write_text(text.replace(old, f"{old}{wait}            __import__('time').sleep(0.01)\n"))


@pytest.mark.integration
@needs_haproxy
def test_images_to_classify_wait_in_the_queue_of_the_gateway(bundle: Bundle, tmp_path: Path) -> None:
    """A request in flight and a waiting request: others are refused at once, while both have no answer."""
    repository = repository_from_bundle(bundle, tmp_path / "models")
    hold_answers(repository.path)
    queue = {"in_flight": 1, "queue_limit": 1, "queue_timeout_ms": 60_000}
    image = encoded(photo(32, 32), "PNG")

    def ask() -> int:
        return request(service.http_url, "/classify", image).status

    def count() -> float:
        return metric_values(service.metrics_url, "haproxy_backend_current_sessions").get('{proxy="front"}', 0)

    with running_service(repository.path, tmp_path, **queue) as service, ThreadPoolExecutor(2) as pool:
        with answers_held(repository.path):
            taken = []
            for number in (1, 2):
                taken.append(pool.submit(ask))
                wait_until(lambda number=number: count() == number, f"{number} requests in the gateway")
            assert [ask() for _ in range(4)] == [503] * 4
            assert not any(future.done() for future in taken)
        assert [future.result() for future in taken] == [200, 200]
    assert {json.loads(line)["model"] for line in (tmp_path / "access.log").read_text().splitlines()} == {"gmmvit"}


@pytest.mark.integration
@needs_haproxy
def test_a_second_signal_before_the_start_kills_nothing(tmp_path: Path) -> None:
    with Service(ServerOptions(**FREE_PORTS), GatewaySettings(keys=key_file(tmp_path))) as service:
        service.kill_now()
