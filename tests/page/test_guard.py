"""Requests that the page refuses before reading them, and addresses that a browser may load."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.page.server import LOOPBACK, Guard, is_loopback, listening_socket, url_of

MOST = 1000


async def _length(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


def ask(
    headers: dict[str, str] | None = None, chunks: Iterable[bytes] = (b"",), kind: str = "http", **options: Any
) -> list[dict[str, Any]]:
    """Return what the guard sends for a request."""
    guard = Guard(
        Starlette(routes=[Route("/", _length, methods=["POST"])]), most_bytes=MOST, **{"hosts": LOOPBACK, **options}
    )
    parts = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    parts.append({"type": "http.request", "body": b"", "more_body": False})
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return parts.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    given = {"host": "localhost:8080", **(headers or {})}
    scope = {
        "type": kind,
        "method": "POST",
        "path": "/",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }
    asyncio.run(guard(scope, receive, send))
    return sent


def test_a_request_passes_and_its_answer_forbids_other_addresses() -> None:
    start, body = ask(chunks=[b"x" * 400, b"y" * 600])
    assert (start["status"], body["body"]) == (200, b"1000")
    policy = dict(start["headers"])[b"content-security-policy"].decode()
    assert "default-src 'self'" in policy
    assert "http" not in policy
    assert "*" not in policy


def test_a_body_beyond_the_bound_is_refused_by_its_stated_length() -> None:
    assert ask({"content-length": str(MOST + 1)})[0]["status"] == 413
    assert ask({"content-length": "many"})[0]["status"] == 413


def test_a_body_beyond_the_bound_is_refused_without_a_stated_length() -> None:
    assert ask(chunks=[b"x" * 600, b"y" * 401])[0]["status"] == 413


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8080", "[::1]:80"])
def test_names_of_this_machine_pass(host: str) -> None:
    assert ask({"host": host})[0]["status"] == 200


def test_another_name_is_refused_on_loopback_only() -> None:
    assert ask({"host": "example.org"})[0]["status"] == 421
    assert ask({"host": "example.org"}, hosts=())[0]["status"] == 200


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_a_page_of_another_origin_is_refused(kind: str) -> None:
    (first, *_) = ask({"origin": "http://localhost:9999"}, kind=kind)
    assert first["status" if kind == "http" else "code"] == (403 if kind == "http" else 1008)
    if kind == "http":
        assert ask({"origin": "http://localhost:8080"})[0]["status"] == 200


def test_addresses() -> None:
    assert [host for host in ("127.0.0.1", "127.1.2.3", "localhost", "::1", "0.0.0.0") if not is_loopback(host)] == [  # noqa: S104
        "0.0.0.0"  # noqa: S104 - the address that must not count as loopback
    ]
    with listening_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1, port {port}"):
            listening_socket("127.0.0.1", port)
    with pytest.raises(InputError, match="cannot listen on no-such-host"):
        listening_socket("no-such-host.invalid", 0)
