"""``POST /classify`` without a gateway: what it answers, whom it refuses, and ``gmmvit serve`` with it.

`test_front` checks what the front answers and refuses with and without a gateway, and `test_page` its page.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable

import httpx
import pytest
import uvicorn

from gmmvit_deploy.serving.front import _http
from gmmvit_deploy.serving.front._app import front_app
from gmmvit_deploy.serving.front.options import FrontOptions
from gmmvit_deploy.serving.front.process import FrontProcess
from gmmvit_deploy.serving.repository import Repository
from tests.cli.terminal import gmmvit_here, refused
from tests.inference.test_preprocess import encoded, photo
from tests.serving.commands import Serve, kinds_of, metric_values

pytestmark = pytest.mark.integration

IMAGE = encoded(photo(40, 30), "JPEG")
OTHERS = {
    "another host": {"Host": "attacker.example"},
    "a name that contains loopback": {"Host": "127.0.0.1.attacker.example:80"},
    "another origin": {"Origin": "https://attacker.example"},
    "another port": {"Origin": "http://127.0.0.1:1"},
    "an origin of its own name": {"Host": "attacker.example:8080", "Origin": "http://attacker.example:8080"},
    "no origin": {"Origin": "null"},
    "the same site": {"Sec-Fetch-Site": "same-site"},
    "another site": {"Sec-Fetch-Site": "cross-site"},
}


class TestWhoMayAsk:
    @pytest.mark.parametrize("name", OTHERS)
    def test_pages_of_other_origins_are_refused(self, name: str, front: FrontProcess) -> None:
        answer = httpx.post(front.classify_url, content=IMAGE, headers=OTHERS[name], trust_env=False)
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
        if "Host" in OTHERS[name]:  # DNS rebinding
            assert httpx.get(front.url, headers=OTHERS[name], trust_env=False).status_code == 403

    def test_its_own_page_and_programs_are_admitted(self, front: FrontProcess) -> None:
        for host in ("localhost", f"127.0.0.1:{front.port}", "[::1]:80"):
            for more in ({}, {"Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}):
                headers = {"Host": host, **more}
                answer = httpx.post(front.classify_url, content=IMAGE, headers=headers, trust_env=False, timeout=30)
                assert answer.status_code == 200, headers


MALFORMED = {
    "a length with a sign": b"POST /classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: +4\r\n\r\nabcd",
    "chunked with a length": b"POST /classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a head without an end": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 2**20,
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_http_is_refused_and_the_connection_closed(name: str, front: FrontProcess) -> None:
    with socket.create_connection(("127.0.0.1", front.port), timeout=10) as connection:
        answer = b""
        try:
            connection.sendall(MALFORMED[name])
            while piece := connection.recv(4096):
                answer += piece
        except ConnectionError:  # closed while this test still sends
            assert name == "a head without an end"
        assert answer.startswith(b"HTTP/1.1 400 ") or name == "a head without an end"
    assert front.ready()


@pytest.mark.parametrize("what", ["bytes after an answer", "the body of a refused request"])
def test_a_client_that_sends_too_slowly_loses_its_connection(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_http, "HEAD_TIMEOUT_S", 0.2)
    head = b"Host: localhost\r\nContent-Type: text/plain\r\n"
    request = b"GET /ready HTTP/1.1\r\n" + head + b"\r\n"
    if what == "the body of a refused request":
        request = b"POST /classify HTTP/1.1\r\n" + head + b"Content-Length: 1000000\r\n\r\n"

    async def closed() -> bytes:
        config = uvicorn.Config(
            front_app(FrontOptions(triton_url="http://127.0.0.1:1"), None), http=_http.LimitedHttp, lifespan="on"
        )
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            running = asyncio.create_task(server._serve(sockets=[listener]))
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(request)
            await reader.readuntil(b"}")
            writer.write(b"\r\n")
            rest = await asyncio.wait_for(reader.read(), 20)
            writer.close()
            server.should_exit = True
            await running
        return rest

    assert asyncio.run(closed()) == b""


def test_every_port_in_use_is_named_with_its_option(repository: Repository) -> None:
    with contextlib.ExitStack() as opened:
        taken = [opened.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(4)]
        ports = dict(zip(("HTTP", "gRPC", "metrics", "classify"), taken, strict=True))
        options = [word for name, port in ports.items() for word in (f"--{name.lower()}-port", str(port))]
        error, _ = refused(gmmvit_here("serve", repository.path, *options))
    for name, port in ports.items():
        assert f"{name} port {port} on 127.0.0.1 cannot be opened" in error
        assert f"another port with --{name.lower()}-port" in error


@pytest.mark.nightly
def test_serve_names_the_address_and_starts_the_process_again(serve: Callable[..., Serve]) -> None:
    command = serve()
    where = command.ready()
    assert httpx.post(where["classify"], content=IMAGE, trust_env=False, timeout=60).status_code == 200
    (pid,) = [pid for pid, kind in kinds_of(command.process.pid).items() if kind == "front"]
    os.kill(pid, signal.SIGKILL)
    # The next connection waits until the process runs again.
    assert httpx.post(where["classify"], content=IMAGE, trust_env=False, timeout=60).status_code == 200
    assert metric_values(where["metrics"], "gmmvit_front_restarts_total") == {"": 1.0}
    command.process.send_signal(signal.SIGTERM)
    assert command.end()[0] == 0
