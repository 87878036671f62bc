"""The end of HAProxy: requests are answered, idle connections are not waited for, a dead HAProxy is no error."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gmmvit_deploy.serving.gateway.haproxy import HAProxy, find_haproxy
from tests.haproxy import needs_haproxy
from tests.waiting import wait_until

pytestmark = [needs_haproxy, pytest.mark.nightly]

CONFIG = """
global
    stats socket {folder}/admin.sock mode 600 level admin
    hard-stop-after 30s
defaults
    mode http
    option idle-close-on-response
    timeout client 60s
    timeout server 60s
    timeout connect 2s
    timeout http-keep-alive 60s
frontend all
    bind fd@{listener}
    http-request return status 200 if {{ path /now }}
    default_backend slow
backend slow
    server slow 127.0.0.1:{port}
"""


@pytest.fixture
def asked() -> threading.Event:
    """Set once the slow server has a request."""
    return threading.Event()


@pytest.fixture
def haproxy(tmp_path: Path, asked: threading.Event) -> Iterator[tuple[HAProxy, int, int]]:
    """Yield (HAProxy, its port, its process).  The server behind HAProxy answers after a second."""
    program = find_haproxy()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as slow:

        def answer() -> None:
            try:
                connection, _ = slow.accept()
            except OSError:  # the test has ended without a request
                return
            connection.recv(65536)
            asked.set()
            time.sleep(1)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nslow")

        threading.Thread(target=answer, daemon=True).start()
        config = tmp_path / "haproxy.cfg"
        ports = {"listener": listener.fileno(), "port": slow.getsockname()[1]}
        config.write_text(CONFIG.format(folder=tmp_path, **ports))
        running = HAProxy(program, config, socket_path=tmp_path / "admin.sock", passed=(listener.fileno(),))
        running.start()
        yield running, listener.getsockname()[1], running.pid
        running.kill_now()
        running.stop(1)


@pytest.mark.integration
def test_a_request_is_answered_and_an_idle_connection_is_not_waited_for(
    haproxy: tuple[HAProxy, int, int], asked: threading.Event
) -> None:
    """If HAProxy waited for the idle connection, it would wait for all of the ten minutes."""
    running, port, pid = haproxy
    idle, busy = (http.client.HTTPConnection("127.0.0.1", port, timeout=20) for _ in range(2))
    idle.request("GET", "/now")
    idle.getresponse().read()
    busy.request("GET", "/slow")
    assert asked.wait(60)
    stopping = threading.Thread(target=running.stop, args=(600.0,), daemon=True)
    stopping.start()
    assert busy.getresponse().read() == b"slow"
    wait_until(lambda: not stopping.is_alive(), "the end of HAProxy")
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.integration
def test_after_a_handover_kept_connections_get_their_answer(haproxy: tuple[HAProxy, int, int]) -> None:
    running, port, before = haproxy
    kept = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    kept.request("GET", "/now")
    kept.getresponse().read()
    running.hand_over()
    assert running.pid != before
    assert running.leaving
    kept.request("GET", "/now")
    answer = kept.getresponse()
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    answer.read()
    wait_until(lambda: not running.leaving, "the end of the HAProxy that handed over")
    assert f"Pid: {running.pid}" in running.command("show info")


@pytest.mark.integration
def test_a_handover_to_an_invalid_configuration_is_refused(haproxy: tuple[HAProxy, int, int], tmp_path: Path) -> None:
    running, port, before = haproxy
    (tmp_path / "haproxy.cfg").write_text("no configuration\n")
    with pytest.raises(Exception, match="HAProxy refuses this configuration"):
        running.hand_over()
    assert running.pid == before
    kept = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    kept.request("GET", "/now")
    assert kept.getresponse().status == 200


@pytest.mark.integration
def test_a_haproxy_that_was_killed_is_stopped_without_an_error(haproxy: tuple[HAProxy, int, int]) -> None:
    running, _, pid = haproxy
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    running.stop(5)
    assert running.ended
