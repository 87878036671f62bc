"""A handover to another HAProxy, and the end of a dead HAProxy.  `test_stop` ends one under load."""

from __future__ import annotations

import http.client
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gmmvit_deploy.serving.gateway.haproxy import HAProxy, find_haproxy
from tests.haproxy import needs_haproxy
from tests.waiting import wait_until

pytestmark = [needs_haproxy, pytest.mark.integration, pytest.mark.nightly]

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
    http-request return status 200
"""


@pytest.fixture
def haproxy(tmp_path: Path) -> Iterator[tuple[HAProxy, int, int]]:
    """Yield (HAProxy, its port, its process)."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = tmp_path / "haproxy.cfg"
        config.write_text(CONFIG.format(folder=tmp_path, listener=listener.fileno()))
        running = HAProxy(find_haproxy(), config, socket_path=tmp_path / "admin.sock", passed=(listener.fileno(),))
        running.start()
        yield running, listener.getsockname()[1], running.pid
        running.kill_now()
        running.stop(1)


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


def test_a_handover_to_an_invalid_configuration_is_refused(haproxy: tuple[HAProxy, int, int], tmp_path: Path) -> None:
    running, port, before = haproxy
    (tmp_path / "haproxy.cfg").write_text("no configuration\n")
    with pytest.raises(Exception, match="HAProxy refuses this configuration"):
        running.hand_over()
    assert running.pid == before
    kept = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    kept.request("GET", "/now")
    assert kept.getresponse().status == 200


def test_a_haproxy_that_was_killed_is_stopped_without_an_error(haproxy: tuple[HAProxy, int, int]) -> None:
    running, _, pid = haproxy
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    running.stop(5)
    assert running.ended
