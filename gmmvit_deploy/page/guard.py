"""Protect the page: refuse unsafe requests, and limit what a browser may load.

host      on loopback, a request whose Host header names another machine is refused (protects from DNS rebinding)
origin    a request from a page of another origin is refused
size      a request with a body above the maximum size is refused before the body is stored
loads     the browser loads nothing from other addresses (Content-Security-Policy)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

__all__ = ["LOOPBACK", "POLICY", "Guard"]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; font-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    # NiceGUI compiles the templates of its elements in the browser, which needs 'unsafe-eval'.
    "script-src 'self' 'unsafe-inline' 'unsafe-eval'; connect-src 'self'; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class Guard:
    """ASGI middleware that refuses unsafe requests and adds headers to responses.

    most_bytes: the maximum size of a request body.  hosts: the allowed Host headers; empty allows every header.
    """

    def __init__(self, app: Application, *, most_bytes: int, hosts: tuple[str, ...]) -> None:
        self._app, self._most_bytes, self._hosts = app, most_bytes, hosts

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        status, problem = self._refusal(headers)
        if not problem:
            await self._app(scope, self._bounded(receive), _with_headers(send))
        elif scope["type"] == "http":
            await _refuse(send, status, problem)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _refusal(self, headers: dict[str, str]) -> tuple[int, str]:
        """Return (HTTP status, reason) of a refusal, or an empty reason if the request is accepted."""
        host = headers.get("host", "")
        if self._hosts and _name(host) not in self._hosts:
            return 421, f"expected the Host header {' or '.join(self._hosts)}, got {_name(host)!r}\n"
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return 403, "this server refuses requests from pages of another origin\n"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._most_bytes:
            return 413, f"the upload is too large: expected at most {self._most_bytes} bytes\n"
        return 200, ""

    def _bounded(self, receive: Receive) -> Receive:
        """Wrap ``receive`` to count the bytes of the body, because the Content-Length may be missing or wrong."""
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._most_bytes:
                    from starlette.exceptions import HTTPException

                    raise HTTPException(413, f"the upload is too large: expected at most {self._most_bytes} bytes")
            return message

        return bounded


def _name(host: str) -> str:
    """Return a Host header without the port: ``localhost:8080`` → localhost;  ``[::1]:8080`` → ::1."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *_HEADERS]
        await send(message)

    return sending


async def _refuse(send: Send, status: int, problem: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), *_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": problem.encode()})
