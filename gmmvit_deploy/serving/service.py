"""What ``gmmvit serve`` runs around a Triton server: a supervisor, the front (images by HTTP), and a gateway.

without a gateway   the supervisor answers on the metrics port, also while the server restarts; the front has a port of
                    its own on loopback
with a gateway      the server and the front listen on loopback; HAProxy is before them
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from gmmvit_deploy.errors import MissingDependencyError, ServerError
from gmmvit_deploy.serving._local_http import MetricsEndpoint, text_from_url
from gmmvit_deploy.serving._metric_text import filesystem_metrics
from gmmvit_deploy.serving._supervisor import Supervisor
from gmmvit_deploy.serving.front.options import (
    CLASSIFY_PATH,
    DEFAULT_BODY_BYTES,
    DEFAULT_BUFFERED_BYTES,
    EMBED_PATH,
    FrontOptions,
)
from gmmvit_deploy.serving.front.process import FrontProcess
from gmmvit_deploy.serving.gateway.gateway import Gateway, behind_gateway
from gmmvit_deploy.serving.gateway.options import BLUE, GatewaySettings, is_loopback
from gmmvit_deploy.serving.ports import free_ports, listening_socket
from gmmvit_deploy.serving.server import ServerOptions, TritonServer

_LOOPBACK = "127.0.0.1"
_POLL_S = 0.05
_NOT_OFFERED = "HTTP endpoint: POST /classify and /embed are not offered"
_NO_IMAGES = "no model of the repository takes encoded images"


class Replica:
    """A Triton server that is kept running, with the front that answers ``POST /classify`` and ``/embed`` from it.

    name: of the server in the gateway.  files: closed when the server has ended.
    front: None before `start`, and if no front is offered.
    death: why the server is dead; "" while it lives. Only `look` sets it.
    """

    def __init__(self, server: TritonServer, *, name: str = "triton", files: ExitStack | None = None) -> None:
        self.server, self.name = server, name
        self.supervisor = Supervisor(server)
        self.front: FrontProcess | None = None
        self.death = ""
        self._files = files or ExitStack()

    def start(
        self,
        gateway: Gateway | None,
        *,
        note: Callable[[str], None],
        listener: socket.socket | None = None,
        cancelled: Callable[[], bool],
    ) -> None:
        """Start the server and the front, and wait until both are ready, or until ``cancelled`` returns True.

        gateway: passes requests to both, or None.  listener: the socket of a front without a gateway; with neither,
        no front is started.  note: called with the reason why no front is offered.
        Errors: those of `TritonServer.start`; ServerError when the front does not start.
        """
        self.server.check_repository()
        self.front = self._front(gateway, listener, note)  # it loads its packages while the server loads the models
        self.server.start(cancelled=cancelled)
        if self.front is None or cancelled():
            return
        models = self.server.models.with_images()
        if not models:  # those that take images could not be loaded
            self.front.stop()
            self.front = None
            note(f"{_NOT_OFFERED}: {_NO_IMAGES}")
            return
        body_bytes = DEFAULT_BODY_BYTES if gateway is None else gateway.settings.max_body_bytes
        self.front.serve(
            FrontOptions(
                triton_url=self.server.http_url,
                metrics_url=self.server.metrics_url,
                models=models,
                max_body_bytes=body_bytes,
                max_buffered_bytes=max(DEFAULT_BUFFERED_BYTES, body_bytes),
            )
        )
        self.front.wait_ready(cancelled=cancelled)

    def _front(
        self, gateway: Gateway | None, listener: socket.socket | None, note: Callable[[str], None]
    ) -> FrontProcess | None:
        """Start a front without options; return None, with a note of the reason, if no front is offered."""
        if gateway is None and listener is None:
            return None
        if not self.server.models.with_images():
            note(f"{_NOT_OFFERED}: {_NO_IMAGES}")
            return None
        if gateway is not None and gateway.upstreams is not None and not gateway.upstreams.with_fronts:
            note(f"{_NOT_OFFERED} before a restart: the first bundle takes no images")
            return None
        try:
            secret = None if gateway is None else gateway.front_secret
            return FrontProcess(None, secret, listener=listener, on_log_line=note)
        except MissingDependencyError as exc:
            note(f"{_NOT_OFFERED}: {exc}")
            return None

    def step(self, stopped: Callable[[], bool]) -> None:
        """Restart what is dead; call it often.  Errors: ServerError when a part does not stay alive."""
        self.supervisor.step(stopped)
        if self.front is not None:
            self.front.step()

    def look(self) -> None:
        """Notice the death of the server, which is not restarted, and restart a dead front.  Errors: as `step`."""
        if not self.death and (problem := self.supervisor.look()):
            self.death = problem[1]
        if self.front is not None:
            self.front.step()

    def metrics_text(self) -> str:
        """Return the metrics of the server, of its supervisor and of the front, in Prometheus's text format."""
        return self.supervisor.metrics_text() + (self.front.metrics_text() if self.front is not None else "")

    def stop(self) -> None:
        """Complete the requests in progress, and end the front, then the server."""
        with self._files:
            try:
                if self.front is not None:
                    self.front.stop()
            finally:
                self.supervisor.close()
                self.server.stop()

    def kill_now(self) -> None:
        """Kill both at once, as a signal handler may; call `stop` afterwards."""
        self.server.kill_now()
        if self.front is not None:
            self.front.kill_now()


class Service:
    """A Triton server with what belongs to it.  Use it in the main thread, inside ``with service:``.

    server_options: the options with which the caller makes the `TritonServer` for `start`.
    gateway: HAProxy before the server, or None.  replica: what gets the requests; None before `start`.
    new: during a rollout, what will replace ``replica``.  lock: held while a replica restarts or ends.
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
        self.note = on_gateway_line or (lambda line: None)
        self.lock = threading.RLock()
        self.replica: Replica | None = None
        self.new: Replica | None = None
        self.gateway: Gateway | None = None
        self._opened = ExitStack()
        self._endpoint: MetricsEndpoint | None = None
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

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def server(self) -> TritonServer:
        """The server that gets the requests.  Errors: ServerError before `start`."""
        return self.served().server

    def served(self) -> Replica:
        """Return the replica that gets the requests.  Errors: ServerError before `start`."""
        if self.replica is None:
            raise ServerError("the service has no server; it is starting")
        return self.replica

    def require_ports(self, *, takes_images: bool) -> None:
        """Check the ports of a service without a gateway, before the work of its start.  Errors: as for `free_ports`.

        takes_images: True if the server has a model for the front.
        """
        options = self._options
        services = {
            "HTTP": (options.host, options.http_port),
            "gRPC": (options.host, options.grpc_port),
            "metrics": (options.host, options.metrics_port),
        }
        if takes_images and self._classify_port is not None:
            services["classify"] = (self._classify_host, self._classify_port)
        free_ports(services)

    @property
    def _classify_host(self) -> str:
        return self._options.host if is_loopback(self._options.host) else _LOOPBACK

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
        """The address that answers images with labels, or None.  Of several models, ``/NAME`` must follow."""
        return self._url_of_front(CLASSIFY_PATH, "logits")

    @property
    def embed_url(self) -> str | None:
        """The address that answers images with features, or None.  Of several models, ``/NAME`` must follow."""
        return self._url_of_front(EMBED_PATH, "features")

    def _url_of_front(self, path: str, output: str) -> str | None:
        front = self.served().front
        if front is None or not self.server.models.with_images(output):
            return None
        return f"{front.url if self.gateway is None else self.http_url}{path}"

    def start(
        self,
        server: TritonServer,
        *,
        cancelled: Callable[[], bool],
        rollouts: bool = False,
        files: ExitStack | None = None,
        sources: Mapping[str, Callable[[], str]] | None = None,
    ) -> None:
        """Start the server and what belongs to it, and wait until all is ready, or until ``cancelled`` returns True.

        rollouts: True if the server can be replaced (`rollout`); needs a gateway.  files: closed when the server has
        ended.  sources: as in `Gateway.start`.
        Errors: those of `TritonServer.start`, and of `Gateway.start` with a gateway.
        """
        self.replica = replica = Replica(server, name=BLUE if rollouts else "triton", files=files)
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
        self._opened.callback(self._stop_replicas)  # after the gateway, so that front and server answer its requests
        replica.start(self.gateway, listener=listener, note=self.note, cancelled=cancelled)
        if listener is not None and replica.front is None:
            listener.close()  # so that clients are refused, and do not wait for an answer
        if self.gateway is None or cancelled():
            return
        log = self.gateway.settings.access_log
        joined: dict[str, Callable[[], str]] = {
            "server": lambda: text_from_url(self.server.metrics_url),
            "supervisor": lambda: self.served().supervisor.metrics.text(),
            "filesystems": partial(filesystem_metrics, () if log is None else (log.absolute().parent,)),
            **(sources or {}),
        }
        if replica.front is not None:
            joined["front"] = self._front_metrics
        self._opened.callback(self.gateway.stop)
        front = replica.front.front if replica.front else None
        self.gateway.start(server, front=front, sources=joined, rollouts=rollouts)

    def _front_metrics(self) -> str:
        front = self.served().front
        return front.metrics_text() if front is not None else ""

    def _classify_listener(self, server: TritonServer) -> socket.socket | None:
        """Open the port of the front; None, with a note, if the repository has no model that takes images."""
        if self._classify_port is None:
            return None
        if not server.models.with_images():
            self.note(f"{_NOT_OFFERED}: {_NO_IMAGES}")
            return None
        return self._opened.enter_context(listening_socket(self._classify_host, self._classify_port, "classify"))

    def run(self, stopped: Callable[[], bool]) -> None:
        """Watch all parts until ``stopped`` returns True.  Errors: ServerError when a part does not stay alive."""
        while not stopped():
            if self.gateway is not None:
                self.gateway.step()
            with self.lock:
                self.served().step(stopped)
                if self.new is not None:
                    self.new.look()
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Complete the requests in progress, and end all parts.  It may be called again."""
        self._opened.close()

    def _stop_replicas(self) -> None:
        with self.lock, ExitStack() as stops:
            for replica in (self.replica, self.new):
                if replica is not None:
                    stops.callback(replica.stop)
            self.new = None

    def kill_now(self) -> None:
        """Kill all parts at once, as a signal handler may; call `stop` afterwards."""
        for part in (self.gateway, self.replica, self.new):
            if part is not None:
                part.kill_now()
