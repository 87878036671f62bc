"""HTTP on this machine: ask a server without the proxy that environment variables may name, and serve a socket."""

from __future__ import annotations

import http.client
import socket
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["HttpThread", "answers", "text_from_url"]

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def text_from_url(url: str, *, timeout_s: float) -> str:
    """Return the body of an HTTP answer.  Errors: OSError, HTTPException."""
    with _DIRECT.open(url, timeout=timeout_s) as answer:
        return bytes(answer.read()).decode(errors="replace")


def answers(url: str, *, timeout_s: float) -> bool:
    """Return whether a request gets an answer with a status below 300."""
    try:
        text_from_url(url, timeout_s=timeout_s)
    except (OSError, http.client.HTTPException):
        return False
    return True


class HttpThread:
    """Answers the requests on a listening socket in threads, up to `close`, which closes the socket."""

    def __init__(self, listener: socket.socket, handler: type[BaseHTTPRequestHandler]) -> None:
        self._server = ThreadingHTTPServer(("", 0), handler, bind_and_activate=False)
        self._server.daemon_threads = True
        self._server.socket.close()
        self._server.socket = listener
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.socket.close()
