"""Serve the page of a trial until SIGINT or SIGTERM."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable
from typing import Any

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.extras import require
from gmmvit_deploy.images.preprocess import MAX_IMAGE_BYTES
from gmmvit_deploy.page.guard import LOOPBACK, Guard
from gmmvit_deploy.page.trial import Trial

__all__ = ["is_loopback", "listening_socket", "page_app", "require_page_library", "serve_page"]

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

    from gmmvit_deploy.page.view import PageView

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
