"""Answer ``/metrics`` on a loopback port with the metrics of all parts of the service, in Prometheus' text format."""

from __future__ import annotations

import http.client
import socket
import threading
import urllib.request
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType

__all__ = ["MetricsServer", "text_from_socket", "text_from_url"]

_TIMEOUT_S = 5.0
# The sources run on this machine, so requests to them must bypass a proxy that environment variables name.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def text_from_url(url: str) -> str:
    """Return the body of an HTTP answer.  Errors: OSError."""
    with _DIRECT.open(url, timeout=_TIMEOUT_S) as answer:
        return str(answer.read().decode(errors="replace"))


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


class MetricsServer:
    """Serves the joined metrics until `close`.

    sources: name of the source → function that returns its metrics. A source that fails is left out;
    ``gmmvit_metrics_source_up`` states for each source whether it answered.
    """

    def __init__(self, sources: Mapping[str, Callable[[], str]]) -> None:
        self._sources = dict(sources)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)

    def text(self) -> str:
        """Return the metrics of all sources that answer."""
        parts, states = [], []
        for name, source in self._sources.items():
            try:
                parts.append(source().rstrip("\n"))
                states.append((name, 1))
            except (OSError, http.client.HTTPException):
                states.append((name, 0))
        own = [
            "# HELP gmmvit_metrics_source_up 1 if this part of the service answered with its metrics.",
            "# TYPE gmmvit_metrics_source_up gauge",
            *(f'gmmvit_metrics_source_up{{source="{name}"}} {state}' for name, state in states),
        ]
        return "\n".join([*parts, *own, ""])

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        metrics = self

        class Handler(BaseHTTPRequestHandler):
            timeout = _TIMEOUT_S

            def do_GET(self) -> None:
                body = metrics.text().encode() if self.path == "/metrics" else b""
                self.send_response(200 if body else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
                """Log nothing: the access log is HAProxy's."""

        return Handler
