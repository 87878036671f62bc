"""Who may ask the front: only the gateway, or without a gateway only programs and the page of this machine.

Guards are ASGI middleware. They refuse a request before its body is received.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from gmmvit_deploy.serving.front._uploads import Refusal
from gmmvit_deploy.serving.front.options import FRONT_HEADER, READY_PATH
from gmmvit_deploy.serving.gateway.options import is_loopback

Headers = Mapping[bytes, bytes]


class Guard:
    """Answers with ``refused`` a request of which ``reason`` returns a text; "" admits the request.

    reason: called with the method, the path and the headers.
    """

    def __init__(
        self, app: ASGIApp, *, reason: Callable[[str, str, Headers], str], refused: Callable[[Refusal], ASGIApp]
    ) -> None:
        self._app, self._reason, self._refused = app, reason, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            reason = self._reason(scope["method"], scope["path"], dict(scope["headers"]))
            app = self._refused(Refusal(403, reason)) if reason else app
        await app(scope, receive, send)


def only_gateway(secret: str) -> Callable[[str, str, Headers], str]:
    """Return the ``reason`` of a `Guard` that admits requests with the secret, and requests for readiness."""
    expected = secret.encode()

    def reason(method: str, path: str, headers: Headers) -> str:
        if path == READY_PATH or hmac.compare_digest(headers.get(FRONT_HEADER.encode(), b""), expected):
            return ""
        return "this port answers only the gateway"

    return reason


def only_this_machine(method: str, path: str, headers: Headers) -> str:
    """Return why a request does not come from a program or the page of this machine; "" if it does.

    Every page of the web that a browser of this machine shows can send requests to loopback. With DNS rebinding, a
    page's own name leads to loopback, so the header Host must name loopback. Other requests of pages that do more than
    read state their origin, or at least whether it is this server.
    """
    host = headers.get(b"host", b"").decode("latin-1")
    if not is_loopback(_name(host)):
        return f"expected a Host header that names this machine, such as localhost, got {host[:80]!r}"
    if method in ("GET", "HEAD"):
        return ""
    origin = headers.get(b"origin", b"").decode("latin-1")
    site = headers.get(b"sec-fetch-site", b"none")
    if origin not in ("", f"http://{host}") or site not in (b"same-origin", b"none"):
        return "this server refuses requests of pages of another origin"
    return ""


def _name(host: str) -> str:
    """Return a Host header without its port."""
    return host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
