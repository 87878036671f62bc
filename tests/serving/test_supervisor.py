"""A server that has died serves again within ten seconds, on the same ports; a server under load is left alone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.runtimes.programs.triton import TritonConnection
from gmmvit_deploy.runtimes.runners.triton import TritonRunner
from gmmvit_deploy.serving._supervisor import Supervisor
from gmmvit_deploy.serving.ports import free_ports, listening_socket
from gmmvit_deploy.serving.repository import Repository
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.conftest import FREE_PORTS
from tests.serving.commands import Serve, metric_values, processes_naming, stub_of, values_in
from tests.serving.stand_in import MODEL, write_stand_in
from tests.serving.threads import in_threads
from tests.waiting import best_of, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.nightly]
LONG = "GMMVIT_LONG_TESTS"
"""With this environment variable, the overload lasts a minute."""
WITHIN_S = 10.0


@contextmanager
def clients(url: str, pixels: np.ndarray, logits: np.ndarray) -> Iterator[list[float]]:
    """Send requests from two threads, and yield the times of the correct answers. A wrong answer fails the test."""
    answered: list[float] = []
    wrong: list[float] = []

    def load(ended: threading.Event) -> None:
        with TritonConnection(url, timeout_s=2) as connection:
            while not ended.is_set():
                try:
                    answer = connection.infer("gmmvit_network", "pixels", pixels)
                except ServerError:
                    ended.wait(0.05)
                    continue
                distance = float(np.abs(answer - logits).max())
                (answered if distance < 1e-5 else wrong).append(time.monotonic())

    with in_threads(load, 2):
        yield answered
    assert wrong == []


def run_for(supervisor: Supervisor, seconds: float) -> None:
    """Let the supervisor work for some seconds; a step, such as a restart, may take longer."""
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > end, "the end of a step", within_s=seconds + 60, step=supervisor.step)


def killed_and_back_s(model: str, running: Serve, bundle: Bundle) -> float:
    """Kill a process of a service under load; return the seconds until the restarted server has answered.

    model: whose worker is killed; "" kills the server.
    """
    where = running.ready()
    reason = "worker" if model else "exit"
    pixels, logits = bundle.golden()
    with clients(where["grpc"], pixels, logits) as answered:
        wait_until(lambda: len(answered) > 20, "21 answers")
        os.kill(stub_of(where["pid"], model).pid if model else where["pid"], signal.SIGKILL)
        began = time.monotonic()
        restarts = lambda: metric_values(where["metrics"], "gmmvit_server_restarts_total")  # noqa: E731
        up = lambda: metric_values(where["metrics"], "gmmvit_server_up")[""]  # noqa: E731
        wait_until(lambda: restarts()[f'{{reason="{reason}"}}'] == 1 and up() == 1, "a restart")
        ready_at = time.monotonic()
        wait_until(lambda: answered[-1] > ready_at, "an answer after the restart")
        back_s = next(time_ for time_ in answered if time_ > ready_at) - began
    with TritonConnection(where["http"]) as connection:  # the other port is the same, too
        assert connection.infer("gmmvit_network", "pixels", pixels).shape == logits.shape
    running.process.send_signal(signal.SIGTERM)
    assert running.end()[0] == 0
    return back_s


@pytest.mark.alone
@pytest.mark.parametrize("model", ["gmmvit_network", "gmmvit_preprocess", ""], ids=["worker", "idle worker", "server"])
def test_a_killed_process_under_load_is_back_within_ten_seconds(
    model: str, serve: Callable[..., Serve], bundle: Bundle, tmp_path: Path
) -> None:
    log = tmp_path / "serve.log"
    measure_s = lambda: killed_and_back_s(model, serve("--log", str(log)), bundle)  # noqa: E731
    assert best_of(3, measure_s, enough=WITHIN_S) < WITHIN_S
    text = log.read_text()
    assert "restart 1 of the server begins after 0 s" in text
    assert "the server is ready again after" in text


@pytest.fixture
def supervised(repository: Repository) -> Iterator[Supervisor]:
    """A supervisor of a running server; a test calls `step`."""
    server = TritonServer(repository.path, options=ServerOptions(**FREE_PORTS))
    with server:
        supervisor = Supervisor(server)
        wait_until(
            lambda: len(values_in(supervisor.metrics.text(), "gmmvit_probes_total")) == 2,
            "a probe of each model",
            step=supervisor.step,
        )
        yield supervisor
        supervisor.close()


def paused_and_back_s(supervised: Supervisor, bundle: Bundle) -> float:
    """Pause the process group of a server under load for three seconds; return the seconds until it answers again."""
    server = supervised.server
    with clients(server.grpc_url, *bundle.golden()) as answered:
        wait_until(lambda: len(answered) > 20, "21 answers", step=supervised.step)
        os.killpg(server.pid, signal.SIGSTOP)
        run_for(supervised, 3)
        os.killpg(server.pid, signal.SIGCONT)
        resumed = time.monotonic()
        run_for(supervised, 4)  # a paused server may answer once more, and then die: it must answer for a while
        count = len(answered)
        wait_until(lambda: len(answered) > count + 20, "21 answers after the pause", step=supervised.step)
        return answered[count] - resumed


@pytest.mark.alone
def test_a_paused_process_group_is_back_within_ten_seconds(supervised: Supervisor, bundle: Bundle) -> None:
    assert best_of(3, lambda: paused_and_back_s(supervised, bundle), enough=WITHIN_S) < WITHIN_S


def test_a_free_port_that_another_program_takes_before_triton_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = write_stand_in(tmp_path / "models", delay_s=0)
    with listening_socket("127.0.0.1", 0, "") as other:
        taken = other.getsockname()[1]
        http, metrics = free_ports(dict.fromkeys(("HTTP", "metrics"), ("127.0.0.1", 0)))
        first = iter([(http, taken, metrics)])
        choose = lambda services: next(first, None) or free_ports(services)  # noqa: E731
        monkeypatch.setattr("gmmvit_deploy.serving.server.free_ports", choose)
        with TritonServer(models, options=ServerOptions(**FREE_PORTS)) as running:
            assert running.grpc_port != taken


def decoders_of(server: TritonServer) -> list[int]:
    """Return the PIDs of the processes that decode large images."""
    found = processes_naming("gmmvit_inference.large_images")
    return [pid for pid in found if Path(f"/proc/{pid}/cwd").resolve().is_relative_to(server.repository.resolve())]


def hung_and_restarted_s(supervised: Supervisor, bundle: Bundle, *, decoder: bool = False) -> float:
    """Stop a worker while another model is busy; return the seconds until the server was started again.

    decoder: True to stop the processes that decode large images, and not the preprocessing worker itself.
    """
    restarts = supervised.metrics.restarts  # each for the same reason
    with clients(supervised.server.grpc_url, *bundle.golden()) as answered:
        wait_until(lambda: len(answered) > 20, "21 answers", step=supervised.step)
        first = supervised.server.pid

        def stop_and_step() -> None:
            if supervised.server.pid == first:  # a thread whose decoder has never decoded starts one later
                for pid in decoders_of(supervised.server) if decoder else [preprocessing]:
                    os.kill(pid, signal.SIGSTOP)
            supervised.step()

        preprocessing = stub_of(first, "gmmvit_preprocess").pid
        stopped = time.monotonic()
        wait_until(lambda: supervised.metrics.restarts > restarts, "a restart", step=stop_and_step)
        restarted = time.monotonic()
    assert f'gmmvit_server_restarts_total{{reason="probe"}} {restarts + 1}\n' in supervised.metrics.text()
    return restarted - stopped


@pytest.mark.alone
@pytest.mark.parametrize("decoder", [False, True], ids=["preprocessing", "decoders of large images"])
def test_a_worker_that_hangs_while_another_model_is_busy_is_noticed_within_thirty_seconds(
    decoder: bool, supervised: Supervisor, bundle: Bundle
) -> None:
    """Its process lives, the server reports that it is ready, and the network answers: only a probe shows it."""
    server = supervised.server
    before = server.pid
    assert best_of(3, lambda: hung_and_restarted_s(supervised, bundle, decoder=decoder), enough=30) < 30
    assert server.pid != before
    with TritonConnection(server.http_url) as connection:  # gRPC waits after the clients' failures
        image = np.array([[bundle.golden_set().images[0]]], dtype=np.object_)
        assert connection.infer("gmmvit", "IMAGE", image).shape == (1, 10)


def test_the_wait_grows_with_each_restart_until_the_server_was_steady(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s: list[float] = []
    monkeypatch.setattr("gmmvit_deploy.serving._supervisor._slept", lambda seconds, stopped: waits_s.append(seconds))
    models = write_stand_in(tmp_path / "models")
    with TritonServer(models, options=ServerOptions(**FREE_PORTS)) as server:
        supervisor = Supervisor(server)
        supervisor.max_failed_restarts = 8
        supervisor.step()
        for restart, steady_s in enumerate((60.0, 60.0, 60.0, 0.0), 1):
            supervisor.steady_s = steady_s
            server.kill_now()
            is_back = lambda number=restart: supervisor.metrics.restarts == number  # noqa: E731
            wait_until(is_back, f"restart {restart}", step=supervisor.step)
        assert waits_s == [0, 1, 2, 0]
        (models / MODEL / "1" / "model.py").write_text("this is no Python")
        supervisor.steady_s = 60.0
        server.kill_now()
        with pytest.raises(ServerError, match="did not start"):
            wait_until(lambda: len(waits_s) > 20, "the last restart", step=supervisor.step)
    assert waits_s[4:] == [1, 2, 4, 8, 16, 30, 30, 30]
    assert supervisor.metrics.restarts == 5
    assert "gmmvit_server_failed_restarts_total 8" in supervisor.metrics.text()


def test_ten_times_the_capacity_causes_no_restart(tmp_path: Path) -> None:
    """100 requests a second is the capacity of a batch of 2 that sleeps for 20 ms; 1000 arrive."""
    seconds = 60.0 if os.environ.get(LONG) else 6.0
    models = write_stand_in(tmp_path / "models", delay_s=0.02)
    with TritonServer(models, options=ServerOptions(**FREE_PORTS)) as server:
        supervisor = Supervisor(server)
        supervisor.step()
        with open_loop(server, rate=1000.0) as waiting:
            run_for(supervisor, seconds)
            # A machine that sends fewer requests a second needs longer for a queue that shows the overload.
            wait_until(lambda: waiting() > 500, "500 requests that wait", step=supervisor.step)
        assert supervisor.metrics.restarts == 0, supervisor.metrics.text()
        supervisor.close()
        server.kill_now()  # the queue would take minutes


@contextmanager
def open_loop(server: TritonServer, *, rate: float) -> Iterator[Callable[[], int]]:
    """Send requests at a constant rate without waiting for answers, and yield a function: how many have no answer.

    Clients give up after ten seconds, so that a minute of requests needs no more memory than ten seconds of them.
    """
    import tritonclient.grpc as triton

    sent, answered = [0], [0]
    client = triton.InferenceServerClient(server.grpc_url.removeprefix("grpc://"))
    tensor = triton.InferInput("X", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))

    def note(result: object, error: object) -> None:
        answered[0] += 1  # all callbacks run in one thread

    def load(ended: threading.Event) -> None:
        began = time.monotonic()
        while not ended.is_set():
            # On a machine that cannot send at this rate, the number of due requests is never reached.
            while sent[0] < (time.monotonic() - began) * rate and not ended.is_set():
                client.async_infer(MODEL, [tensor], callback=note, client_timeout=10)
                sent[0] += 1
            time.sleep(0.002)

    with in_threads(load, 1):
        yield lambda: sent[0] - answered[0]
    client.close()


def test_probes_do_not_disturb_what_parity_counts(repository: Repository, bundle: Bundle) -> None:
    """With at least ten times as many probes as usual."""
    with TritonServer(repository.path, options=ServerOptions(**FREE_PORTS)) as server:
        supervisor = Supervisor(server)
        supervisor.probe_interval_s = 0.01
        supervisor.step()
        with TritonRunner(bundle, server.grpc_url) as runner:
            report = check_parity(bundle, [runner])
        assert "gmmvit_probes_total" in supervisor.metrics.text()
        supervisor.close()
    assert report.passed, report.failures()
    assert report.runners[0].check("served").details["joined"] > 0
