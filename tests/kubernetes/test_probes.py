"""The probes and the hook of the pod, as they stand in the manifest, against a real `gmmvit serve --gateway`.

Healthy, starting, with a dead worker, overloaded, and while it drains.
"""

from __future__ import annotations

import http.client
import os
import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.serving.front.process import _EXIT_BEHIND_GATEWAY_S
from gmmvit_deploy.serving.gateway.gateway import _STOP_S
from gmmvit_deploy.serving.gateway.haproxy import _END_S
from gmmvit_deploy.serving.repository import Repository
from gmmvit_deploy.serving.server import _EXIT_S, ServerOptions
from tests.certificates import self_signed
from tests.haproxy import needs_haproxy
from tests.kubernetes.made import object_in, write
from tests.serving.commands import Serve, stub_of
from tests.serving.gateways import request as request_of
from tests.serving.stand_in import MODEL, answers_held, infer_body, write_stand_in
from tests.serving.threads import in_threads
from tests.waiting import wait_until

pytestmark = [needs_haproxy, pytest.mark.integration]
KEY = "key-of-the-kubelet-0123456789"
PRE_STOP_S, EXIT_S, GRACE_S = 10, 48, 65
"""What the page states: the sleep of preStop, the longest time from SIGTERM to the end, and the grace period."""


class Pod:
    """``gmmvit serve`` with the arguments of the manifest, on free ports; and the commands of the kubelet."""

    def __init__(self, container: dict[str, Any], models: Path, folder: Path, *more: str) -> None:
        """more: further arguments of the server."""
        keys, certificate = folder / "keys", self_signed(folder)
        keys.mkdir()
        (keys / "keys.txt").write_text(f"kubelet {KEY}\n")
        (keys / "keys.txt").chmod(0o600)
        self.container = container
        self.certificate = certificate.certificate
        self.paths = {
            "0.0.0.0": "127.0.0.1",  # noqa: S104 - in the pod's own network
            "/etc/gmmvit/keys": str(keys),
            "/etc/gmmvit/tls/tls.crt": str(certificate.certificate),
            "/etc/gmmvit/tls/tls.key": str(certificate.private_key),
        }
        self.serve = Serve(models, *map(self._replaced, container["args"][2:]), *more)
        self.port = 0

    def _replaced(self, word: str) -> str:
        for old, new in self.paths.items():
            word = word.replace(old, new)
        return word

    def ready(self) -> dict[str, Any]:
        where = self.serve.ready()
        self.port = int(where["http"].rpartition(":")[2])
        return where

    def probe(self, name: str) -> bool:
        """Send the request of a probe as the kubelet does, which checks no certificate; return whether it succeeds."""
        probe = self.container[name]
        asked = probe["httpGet"]
        assert asked["port"] == "http"
        context = ssl._create_unverified_context()  # noqa: S323
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=probe["timeoutSeconds"], context=context
        )
        try:
            connection.request("GET", asked["path"])
            return 200 <= connection.getresponse().status < 400
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


@pytest.fixture(scope="module")
def spec(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    written = write(bundle, tmp_path_factory.mktemp("manifests") / "out")
    return object_in(written, "Deployment")["spec"]["template"]["spec"]


@pytest.fixture
def container(spec: dict[str, Any]) -> dict[str, Any]:
    return spec["containers"][0]


@pytest.fixture
def pod(container: dict[str, Any], repository: Repository, tmp_path: Path) -> Iterator[Pod]:
    started = Pod(container, repository.path, tmp_path)
    with started.serve:
        yield started


@pytest.mark.nightly
def test_healthy_dead_worker_and_draining(pod: Pod) -> None:
    """One server in all of these states in turn: a start takes seconds."""
    pod.port = 1  # nothing listens there yet, as in a pod whose container has just started
    assert not pod.probe("startupProbe")
    where = pod.ready()
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert pod.probe(name), name
    _dead_worker(pod, where)
    _draining(pod)


def _dead_worker(pod: Pod, where: dict[str, Any]) -> None:
    worker = stub_of(where["pid"], "gmmvit_network")
    # A supervisor that does nothing, or the server would be back at once.
    os.kill(pod.serve.process.pid, signal.SIGSTOP)
    try:
        os.kill(worker.pid, signal.SIGKILL)
        wait_until(lambda: not pod.probe("readinessProbe"), "a readiness probe that fails")
    finally:
        os.kill(pod.serve.process.pid, signal.SIGCONT)
    # Triton replaces the worker itself, so the probe may succeed before the supervisor restarts the server.
    wait_until(lambda: not Path(f"/proc/{where['pid']}").exists(), "the end of the server without its worker")
    wait_until(lambda: pod.probe("readinessProbe"), "a restart of the server by the supervisor")


def _draining(pod: Pod) -> None:
    """End the pod as Kubernetes does."""
    command = pod.container["lifecycle"]["preStop"]["exec"]["command"]
    started = time.monotonic()
    hook, failed = subprocess.Popen(command), 0
    while hook.poll() is None:  # the pod is still ready for Kubernetes while load balancers learn of its end
        failed = 0 if pod.probe("readinessProbe") else failed + 1
        assert failed < pod.container["readinessProbe"]["failureThreshold"]
        time.sleep(0.1)
    slept = time.monotonic() - started
    assert hook.returncode == 0
    assert slept >= PRE_STOP_S
    pod.serve.process.terminate()
    wait_until(lambda: not pod.probe("readinessProbe"), "a readiness probe that fails")
    assert pod.serve.end(timeout_s=EXIT_S)[0] == 0


@contextmanager
def clients(pod: Pod, number: int, *, times: int) -> Iterator[list[tuple[float, int]]]:
    """Repeat a request of the stand-in from several clients, and yield what they got: (time, status)."""
    outcomes: list[tuple[float, int]] = []

    def repeat(ended: threading.Event) -> None:
        context = ssl.create_default_context(cafile=pod.certificate)
        kept = http.client.HTTPSConnection("127.0.0.1", pod.port, timeout=30, context=context)
        for _ in range(times):
            if ended.is_set():
                break
            answer = request_of("", f"/v2/models/{MODEL}/infer", infer_body(1.0), key=KEY, connection=kept)
            outcomes.append((time.monotonic(), answer.status))
        kept.close()

    with in_threads(repeat, number):
        yield outcomes


@pytest.fixture
def slow_pod(container: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pod]:
    """A pod whose network takes ``request.param`` seconds for two requests, and as a pair, also for its start."""
    delay_s, start_s = request.param if isinstance(request.param, tuple) else (request.param, 0)
    models = write_stand_in(tmp_path / "models", delay_s=delay_s)
    program = models / MODEL / "1" / "model.py"
    program.write_text(f"import time\n\ntime.sleep({start_s})\n{program.read_text()}")
    started = Pod(container, models, tmp_path, "--allow-json", "10000")
    with started.serve:
        yield started


@pytest.mark.nightly
@pytest.mark.parametrize("slow_pod", [0.02], indirect=True)
def test_overload_ends_no_pod_and_takes_none_out_of_service(slow_pod: Pod) -> None:
    slow_pod.ready()
    assert slow_pod.probe("livenessProbe")
    with clients(slow_pod, 60, times=100_000) as outcomes:
        wait_until(lambda: {status for _, status in outcomes} >= {200, 503}, "answers and refusals")
        began = time.monotonic()
        answers = [slow_pod.probe(name) for name in ("livenessProbe", "readinessProbe") for _ in range(5)]
        during = {status for when, status in outcomes if when > began}
    assert during == {200, 503}
    assert all(answers), answers


@pytest.mark.nightly
@pytest.mark.parametrize("slow_pod", [0.0], indirect=True)
def test_a_pod_that_drains_answers_what_it_read_and_no_probe(slow_pod: Pod) -> None:
    metrics = slow_pod.ready()["metrics"]

    def taken() -> bool:
        text = request_of(metrics, "/metrics/gateway", key=KEY, ca=slow_pod.certificate).body.decode()
        return 'haproxy_backend_current_sessions{proxy="triton_http"} 6\n' in text

    with ExitStack() as held:
        held.enter_context(answers_held(slow_pod.serve.path))
        with clients(slow_pod, 6, times=1) as outcomes:  # three batches
            wait_until(taken, "six requests in the pod")
            slow_pod.serve.process.terminate()
            wait_until(lambda: not slow_pod.probe("readinessProbe"), "a readiness probe that fails")
            assert outcomes == []
            held.close()
    assert [status for _, status in outcomes] == [200] * 6
    assert slow_pod.serve.end(timeout_s=EXIT_S)[0] == 0


@pytest.mark.nightly
@pytest.mark.parametrize("slow_pod", [(0.0, 8)], indirect=True)
def test_a_server_that_starts_is_not_ready(slow_pod: Pod) -> None:
    """The gateway's ports are open from the start, and nobody answers there before the models are loaded."""
    port = wait_until(lambda: _first_port(slow_pod.serve.process.pid), "a port of the gateway")
    slow_pod.port = port
    assert not slow_pod.probe("startupProbe")
    assert slow_pod.ready()["http"].endswith(f":{port}")
    assert slow_pod.probe("startupProbe")


def _first_port(pid: int) -> int:
    """Return the port on which a process listened first, or 0.  `gmmvit serve` opens the port for HTTP first."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            sockets.add(str(entry.readlink()))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    listening = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return int(min(listening, key=lambda row: int(row[9]))[1].partition(":")[2], 16) if listening else 0


def test_the_probes_wait_for_a_start_and_for_a_restart(container: dict[str, Any]) -> None:
    args = container["args"]
    start_s = int(args[args.index("--start-timeout") + 1])
    startup, liveness = container["startupProbe"], container["livenessProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= start_s
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 30 + start_s  # the supervisor begins within 30 s


def test_the_end_of_the_server_takes_what_the_page_states(spec: dict[str, Any], container: dict[str, Any]) -> None:
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(PRE_STOP_S)]
    assert spec["terminationGracePeriodSeconds"] == GRACE_S > PRE_STOP_S + EXIT_S
    gateway_s = _STOP_S + 3 * _END_S
    assert gateway_s + _EXIT_BEHIND_GATEWAY_S + ServerOptions().exit_timeout_s + _EXIT_S <= EXIT_S
