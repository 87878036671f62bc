"""HTTP on this machine: ask a server without the proxy that environment variables may name, and serve metrics."""

from __future__ import annotations

import http.client
import socket
import threading
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from gmmvit_deploy.serving.ports import listening_socket

_TIMEOUT_S = 5.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def text_from_url(url: str, timeout_s: float = _TIMEOUT_S) -> str:
    """Return the body of an HTTP answer.  Errors: OSError, HTTPException."""
    with _DIRECT.open(url, timeout=timeout_s) as answer:
        return bytes(answer.read()).decode(errors="replace")


def text_from_socket(path: Path, target: str) -> str:
    """Return the body of the answer to ``GET target`` on a Unix socket.  Errors: OSError, HTTPException."""
    connection = http.client.HTTPConnection("localhost", timeout=_TIMEOUT_S)
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.sock.settimeout(_TIMEOUT_S)
    try:
        connection.sock.connect(str(path))
        connection.request("GET", target)
        return connection.getresponse().read().decode(errors="replace")
    finally:
        connection.close()


def answers(url: str) -> bool:
    """Return whether a request gets an answer with a status below 300."""
    try:
        text_from_url(url)
    except (OSError, http.client.HTTPException):
        return False
    return True


class MetricsEndpoint:
    """Serves ``GET /metrics`` in threads, up to `close`."""

    def __init__(self, host: str, port: int, text: Callable[[], str]) -> None:
        """Start.

        host: the address to listen on.  port: the port; 0 means any free port.  text: returns the metrics.
        Errors: ServerError when the port cannot be opened.
        """
        listener = listening_socket(host, port, "metrics")
        self.port = int(listener.getsockname()[1])
        self.url = f"http://{host}:{self.port}/metrics"
        handler = type("Handler", (_Handler,), {"text": staticmethod(text)})
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


class _Handler(BaseHTTPRequestHandler):
    timeout = _TIMEOUT_S
    text: Callable[[], str]

    def do_GET(self) -> None:
        if self.path != "/metrics":
            self.send_error(404)
            return
        content = self.text().encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Write no line for a request."""
