"""What ``gmmvit serve`` runs around a Triton server: a supervisor, the front (POST /classify), and a gateway.

without a gateway   the supervisor answers on the metrics port, also while the server restarts; the front has a port of
                    its own on loopback
with a gateway      the server and the front listen on loopback; HAProxy is before them
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType

from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.serving._local_http import MetricsEndpoint
from gmmvit_deploy.serving._metric_text import filesystem_metrics
from gmmvit_deploy.serving._replica import Replica, why_no_classify
from gmmvit_deploy.serving.front.options import CLASSIFY_PATH
from gmmvit_deploy.serving.front.process import FrontProcess
from gmmvit_deploy.serving.gateway.options import GatewaySettings, is_loopback
from gmmvit_deploy.serving.gateway.service import Gateway, behind_gateway
from gmmvit_deploy.serving.ports import listening_socket
from gmmvit_deploy.serving.server import ServerOptions, TritonServer

_LOOPBACK = "127.0.0.1"


class Service:
    """A Triton server with what belongs to it.  Use it in the main thread, inside ``with service:``.

    server_options: the options with which the caller makes the `TritonServer` for `start`.
    gateway: HAProxy before the server, or None.
    """

    def __init__(
        self,
        options: ServerOptions,
        settings: GatewaySettings | None = None,
        *,
        classify_port: int | None = None,
        on_gateway_line: Callable[[str], None] | None = None,
    ) -> None:
        """Check keys, certificate and ports of the gateway.  Errors: those of `Gateway`.

        options: their ports are those of the gateway, if there is one.  settings: None serves without a gateway.
        classify_port: the port of the front without a gateway, 0 for a free port; None starts no front.
        """
        self._options, self._classify_port = options, classify_port
        self._note = on_gateway_line or (lambda line: None)
        self._opened = ExitStack()
        self._replica: Replica | None = None
        self._endpoint: MetricsEndpoint | None = None
        self.gateway: Gateway | None = None
        if settings is None:
            self.server_options = replace(options, metrics_host=_LOOPBACK, metrics_port=0)
            return
        self.gateway = Gateway(
            settings,
            http_port=options.http_port,
            grpc_port=options.grpc_port,
            metrics_port=options.metrics_port,
            on_log_line=on_gateway_line,
        )
        self._opened.callback(self.gateway.stop)
        self.server_options = behind_gateway(options, self.gateway.admin_secret)

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def server(self) -> TritonServer:
        """The server.  Errors: ServerError before `start`."""
        if self._replica is None:
            raise ServerError("the service has no server; it is starting")
        return self._replica.server

    @property
    def front(self) -> FrontProcess | None:
        """The service behind ``/classify``, or None."""
        return self._replica.front if self._replica is not None else None

    @property
    def http_url(self) -> str:
        return (self.gateway or self.server).http_url

    @property
    def grpc_url(self) -> str:
        return (self.gateway or self.server).grpc_url

    @property
    def metrics_url(self) -> str:
        """The address of the metrics of all parts of the service."""
        if self.gateway is not None:
            return self.gateway.metrics_url
        return self._endpoint.url if self._endpoint is not None else ""

    @property
    def classify_url(self) -> str | None:
        """The address that takes encoded images, or None."""
        if self.front is None:
            return None
        return self.front.classify_url if self.gateway is None else f"{self.http_url}{CLASSIFY_PATH}"

    def start(self, server: TritonServer, *, cancelled: Callable[[], bool]) -> None:
        """Start the server and what belongs to it, and wait until all is ready, or until ``cancelled`` returns True.

        Errors: those of `TritonServer.start`, and of `Gateway.start` with a gateway.
        """
        self._replica = replica = Replica(server)
        listener = None
        if self.gateway is None:
            server.check_repository()  # a mistake in the path is named before a port that is in use
            self._endpoint = MetricsEndpoint(
                self._options.host,
                self._options.metrics_port,
                lambda: filesystem_metrics() + replica.metrics_text(),
            )
            self._opened.callback(self._endpoint.close)
            listener = self._classify_listener(server)
        self._opened.callback(replica.stop)  # after the gateway, so that requests in progress reach front and server
        replica.start(self.gateway, listener=listener, note=self._note, cancelled=cancelled)
        if listener is not None and replica.front is None:
            listener.close()  # so that clients are refused, and do not wait for an answer
        if self.gateway is None or cancelled():
            return
        sources = {"supervisor": replica.supervisor.metrics.text, **metric_sources(self.gateway)}
        if replica.front is not None:
            sources["front"] = replica.front.metrics_text
        self._opened.callback(self.gateway.stop)
        self.gateway.start(server, front=replica.front.front if replica.front else None, sources=sources)

    def _classify_listener(self, server: TritonServer) -> socket.socket | None:
        """Open the port of the front; None, with a note, if the repository has no model that classifies images.

        Errors: ServerError when the port cannot be opened.
        """
        if self._classify_port is None:
            return None
        if reason := why_no_classify(server):
            self._note(f"HTTP endpoint: POST /classify is not offered: {reason}")
            return None
        host = self._options.host if is_loopback(self._options.host) else _LOOPBACK
        return self._opened.enter_context(listening_socket(host, self._classify_port, "classify"))

    def run(self, stopped: Callable[[], bool]) -> None:
        """Watch all parts until ``stopped`` returns True.  Errors: ServerError when a part does not stay alive."""

        def over() -> bool:
            if stopped():
                return True
            for part in (self.gateway, self.front):
                if part is not None:
                    part.step()
            return False

        if self._replica is not None:
            self._replica.supervisor.run(over)

    def stop(self) -> None:
        """Complete the requests in progress, and end all parts.  It may be called again."""
        self._opened.close()

    def kill_now(self) -> None:
        """Kill all parts at once.  A signal handler may call `kill_now`; call `stop` afterwards to clean up."""
        if self.gateway is not None:
            self.gateway.kill_now()
        if self._replica is not None:
            self._replica.kill_now()


def metric_sources(gateway: Gateway) -> dict[str, Callable[[], str]]:
    """Return the sources of a service's metrics that are no part of it: the file systems that it writes to."""
    log = gateway.settings.access_log
    return {"filesystems": partial(filesystem_metrics, () if log is None else (log.absolute().parent,))}
