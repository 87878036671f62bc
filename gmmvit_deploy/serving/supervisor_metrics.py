"""The metrics of the supervisor in Prometheus's text format, and a port that serves them with those of the server."""

from __future__ import annotations

import http.client
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Literal, get_args

from gmmvit_deploy.serving.local_http import HttpThread, text_from_url
from gmmvit_deploy.serving.metric_text import metric_text
from gmmvit_deploy.serving.ports import listening_socket

__all__ = ["MetricsEndpoint", "RestartReason", "SupervisorMetrics", "fetched_metrics"]

RestartReason = Literal["exit", "worker", "probe"]


class SupervisorMetrics:
    """Counters of the supervisor; threads may count at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._restarts: Counter[str] = Counter(dict.fromkeys(get_args(RestartReason), 0))
        self._failed_restarts = 0
        self._probes: Counter[tuple[str, str]] = Counter()
        self.up = False

    @property
    def restarts(self) -> int:
        return sum(self._restarts.values())

    def count_restart(self, reason: RestartReason) -> None:
        with self._lock:
            self._restarts[reason] += 1

    def count_failed_restart(self) -> None:
        with self._lock:
            self._failed_restarts += 1

    def count_probe(self, model: str, result: str) -> None:
        with self._lock:
            self._probes[model, result] += 1

    def text(self) -> str:
        """Return the metrics in Prometheus's text format."""
        with self._lock:
            restarts = [(f'{{reason="{reason}"}}', count) for reason, count in sorted(self._restarts.items())]
            probes = [
                (f'{{model="{model}",result="{result}"}}', count)
                for (model, result), count in sorted(self._probes.items())
            ]
            return "".join(
                (
                    metric_text("gmmvit_server_up", "gauge", "1 if the server runs, else 0", [("", int(self.up))]),
                    metric_text("gmmvit_server_restarts_total", "counter", "Restarts of the server", restarts),
                    metric_text(
                        "gmmvit_server_failed_restarts_total",
                        "counter",
                        "Restarts after which the server was not ready",
                        [("", self._failed_restarts)],
                    ),
                    metric_text("gmmvit_probes_total", "counter", "Inferences that the supervisor requested", probes),
                )
            )


def fetched_metrics(url: str, *, timeout_s: float = 2.0) -> str:
    """Return the metrics at an address, or an empty text if there is no answer."""
    try:
        return text_from_url(url, timeout_s=timeout_s)
    except (OSError, http.client.HTTPException):
        return ""


class MetricsEndpoint:
    """Serves ``GET /metrics`` in a thread."""

    def __init__(self, host: str, port: int, text: Callable[[], str]) -> None:
        """Start.

        host: the address to listen on.  port: the port; 0 means any free port.  text: returns the metrics.
        Errors: ServerError when the port cannot be opened.
        """
        listener = listening_socket(host, port, "metrics")
        handler = type("Handler", (_Handler,), {"text": staticmethod(text)})
        self.port = int(listener.getsockname()[1])
        self.url = f"http://{host}:{self.port}/metrics"
        self._server = HttpThread(listener, handler)

    def close(self) -> None:
        self._server.close()


class _Handler(BaseHTTPRequestHandler):
    timeout = 5  # seconds
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
