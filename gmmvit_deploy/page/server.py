"""Serve the page of a trial until SIGINT or SIGTERM, refuse unsafe requests, and limit what a browser may load.

host      on loopback, a request whose Host header names another machine is refused (protects from DNS rebinding)
origin    a request from a page of another origin is refused
size      a request with a body above the maximum size is refused before the body is stored
loads     the browser loads nothing from other addresses (Content-Security-Policy)
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.extras import require
from gmmvit_deploy.images.preprocess import MAX_IMAGE_BYTES
from gmmvit_deploy.page.trial import Trial

__all__ = ["LOOPBACK", "Guard", "is_loopback", "listening_socket", "page_app", "require_page_library", "serve_page"]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; font-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    # NiceGUI compiles the templates of its elements in the browser, which needs 'unsafe-eval'.
    "script-src 'self' 'unsafe-inline' 'unsafe-eval'; connect-src 'self'; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_Application = Callable[[_Message, _Receive, _Send], Awaitable[None]]
_ENVELOPE_BYTES = 64 * 2**10  # maximum size of the form data around an uploaded file
_STOP_S = 3


def require_page_library() -> Any:
    """Import NiceGUI, which draws the page.  Errors: MissingDependencyError when NiceGUI is not installed."""
    return require("nicegui", package="nicegui", extra="page")


def is_loopback(host: str) -> bool:
    """Return True if ``host`` is an address that only this machine can reach."""
    return host in LOOPBACK or host.startswith("127.")


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address.

    port: the port; 0 selects a free port.
    Errors: InputError when the socket cannot listen on the address.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(64)
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise InputError(
            f"cannot listen on {host}, port {port}: {reason}", hint="type --port 0 to take a free port"
        ) from exc
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket, such as ``http://127.0.0.1:8080``."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def page_app(trial: Trial, *, host: str) -> Any:
    """Return the ASGI application of the page.

    Call `page_app` only once in a process, because NiceGUI has a single application per process.

    host: the address to listen on. On a loopback address, requests need a Host header that names this machine.
    Errors: MissingDependencyError when NiceGUI is not installed.
    """
    ui = require_page_library().ui
    from fastapi import FastAPI

    from gmmvit_deploy.page._view import PageView

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    view = PageView(trial)
    ui.run_with(
        app,
        root=view.build,
        title=f"Try {trial.bundle.path.name}",
        favicon="🔎",
        language="en-US",
        dark=None,  # follow the setting of the visitor's system
        tailwind=False,
        show_welcome_message=False,
    )
    app.add_middleware(
        Guard,
        most_bytes=MAX_IMAGE_BYTES + _ENVELOPE_BYTES,
        hosts=(*LOOPBACK, host) if is_loopback(host) else (),
    )
    return app


def serve_page(trial: Trial, listener: socket.socket, *, on_ready: Callable[[str], None]) -> None:
    """Serve the page until SIGINT or SIGTERM.

    on_ready: called with the URL of the page when the server accepts connections.
    Errors: MissingDependencyError when NiceGUI or Uvicorn is not installed.
    """
    app = page_app(trial, host=listener.getsockname()[0])
    uvicorn = require("uvicorn", package="uvicorn", extra="page")
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=_STOP_S)
    server = uvicorn.Server(config)
    start = server.startup

    async def startup(sockets: list[socket.socket] | None = None) -> None:
        await start(sockets)
        # `on_ready` is called at the end of Uvicorn's startup: before, the signal handlers are not installed.
        on_ready(url_of(listener))

    server.startup = startup
    with warnings.catch_warnings():
        # When NiceGUI starts, it inspects every object of the process. Some of PyTorch's objects warn when inspected.
        warnings.filterwarnings("ignore", category=FutureWarning, message=r".*torch\.distributed")
        server.run(sockets=[listener])


class Guard:
    """ASGI middleware that refuses unsafe requests and adds headers to responses.

    most_bytes: the maximum size of a request body.  hosts: the allowed Host headers; empty allows every header.
    """

    def __init__(self, app: _Application, *, most_bytes: int, hosts: tuple[str, ...]) -> None:
        self._app, self._most_bytes, self._hosts = app, most_bytes, hosts

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
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

    def _bounded(self, receive: _Receive) -> _Receive:
        """Wrap ``receive`` to count the bytes of the body, because the Content-Length may be missing or wrong."""
        received = 0

        async def bounded() -> _Message:
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


def _with_headers(send: _Send) -> _Send:
    async def sending(message: _Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *_HEADERS]
        await send(message)

    return sending


async def _refuse(send: _Send, status: int, problem: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), *_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": problem.encode()})
