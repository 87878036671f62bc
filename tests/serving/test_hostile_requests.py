"""Requests that ended the server while its threads had the stack of 8 MiB that Linux gives by default."""

from __future__ import annotations

import gzip
import http.client
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import gmmvit_deploy
from gmmvit_deploy.serving.server import TritonServer
from tests.serving.stand_in import MODEL, infer_body

pytestmark = pytest.mark.nightly

LAUNCHER = Path(gmmvit_deploy.__file__).parent / "files" / "_launch.py"
GIB = 1 << 30


def answers(server: TritonServer) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)
    connection.request("POST", f"/v2/models/{MODEL}/infer", infer_body(1))
    answered = connection.getresponse()
    answered.read()
    connection.close()
    return answered.status == 200


@pytest.mark.integration
class TestTheSameServerAnswersAfterwards:
    @pytest.mark.parametrize(
        ("body", "headers"),
        [
            (gzip.compress(b"[" * 250_000, mtime=0), {"Content-Encoding": "gzip"}),
            (b"[" * 200_000, {}),
            (b'{"a":' * 200_000, {}),
        ],
        ids=["277 bytes of gzip", "200 kB of lists", "1 MB of objects"],
    )
    def test_deep_nesting(self, body: bytes, headers: dict[str, str], stand_in: TritonServer) -> None:
        before = stand_in.pid
        assert answers(stand_in)
        connection = http.client.HTTPConnection("127.0.0.1", stand_in.http_port, timeout=60)
        connection.request("POST", f"/v2/models/{MODEL}/infer", body, headers)
        assert connection.getresponse().status in (400, 500)
        connection.close()
        assert answers(stand_in)
        stand_in.require_running()
        assert stand_in.pid == before

    def test_two_million_chunks(self, stand_in: TritonServer) -> None:
        before = stand_in.pid
        head = f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        with socket.create_connection(("127.0.0.1", stand_in.http_port), timeout=120) as connection:
            connection.sendall(head.encode() + b"1\r\na\r\n" * 2_000_000 + b"0\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 500")
        assert answers(stand_in)
        stand_in.require_running()
        assert stand_in.pid == before


@pytest.mark.integration
def test_a_hard_limit_of_the_stack_below_what_was_asked_for_is_used_and_reported() -> None:
    hard = 16 << 20
    command = [sys.executable, "-I", str(LAUNCHER), f"--stack-bytes={GIB}", str(os.getpid())]
    answer = subprocess.run(
        [*command, "/bin/sh", "-c", "ulimit -s"],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, hard)),
    )
    assert answer.stdout == f"{hard >> 10}\n"
    assert f"the hard limit of the stack is {hard} bytes, expected {GIB}" in answer.stderr
