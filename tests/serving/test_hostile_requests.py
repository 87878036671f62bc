"""Requests that ended the server while its threads had the stack of 8 MiB that Linux gives by default."""

from __future__ import annotations

import gzip
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import gmmvit_deploy
from gmmvit_deploy.serving.server import TritonServer
from tests.serving.gateways import request
from tests.serving.stand_in import MODEL, infer_body

pytestmark = pytest.mark.nightly

LAUNCHER = Path(gmmvit_deploy.__file__).parent / "files" / "_launch.py"
GIB = 1 << 30


def answers(server: TritonServer) -> bool:
    return request(server.http_url, f"/v2/models/{MODEL}/infer", infer_body(1)).status == 200


CHUNKED = f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()


def posted(body: bytes, header: str = "X: a") -> bytes:
    head = f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nHost: x\r\n{header}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.integration
@pytest.mark.parametrize(
    "sent",
    [
        posted(gzip.compress(b"[" * 250_000, mtime=0), "Content-Encoding: gzip"),
        posted(b"[" * 200_000),
        posted(b'{"a":' * 200_000),
        CHUNKED + b"1\r\na\r\n" * 2_000_000 + b"0\r\n\r\n",
    ],
    ids=["277 bytes of gzip", "200 kB of lists", "1 MB of objects", "two million chunks"],
)
def test_the_same_server_answers_after_deep_nesting(sent: bytes, stand_in: TritonServer) -> None:
    before = stand_in.pid
    assert answers(stand_in)
    with socket.create_connection(("127.0.0.1", stand_in.http_port), timeout=120) as connection:
        connection.sendall(sent)
        assert connection.recv(100).startswith((b"HTTP/1.1 400", b"HTTP/1.1 500"))
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
