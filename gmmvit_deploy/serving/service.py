"""What ``gmmvit serve`` runs around a Triton server.

BareService       server + supervisor; the supervisor answers on the metrics port, also while the server restarts
GatewayService    server + supervisor on loopback, and in front of it HAProxy and the front (POST /classify)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType

from gmmvit_deploy.errors import MissingDependencyError, ServerError
from gmmvit_deploy.serving.front.options import DEFAULT_BUFFERED_BYTES, FrontOptions
from gmmvit_deploy.serving.front.process import FrontProcess, start_front
from gmmvit_deploy.serving.gateway.files import queue_bounds
from gmmvit_deploy.serving.gateway.options import Front, GatewaySettings
from gmmvit_deploy.serving.gateway.service import Gateway, behind_gateway
from gmmvit_deploy.serving.metric_text import filesystem_metrics, metric_text
from gmmvit_deploy.serving.served_models import read_models
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from gmmvit_deploy.serving.supervisor import Supervisor
from gmmvit_deploy.serving.supervisor_metrics import MetricsEndpoint

__all__ = ["BareService", "FrontKeeper", "GatewayService", "Service", "metric_sources", "started_front"]

_LOOPBACK = "127.0.0.1"
_MOST_FRONT_RESTARTS = 20


class Service:
    """A Triton server with what belongs to it.  Use it in the main thread, inside ``with service:``.

    server_options: the options with which the caller makes the `TritonServer` for `start`.
    """

    server: TritonServer
    server_options: ServerOptions
    gateway: Gateway | None = None

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def http_url(self) -> str:
        return (self.gateway or self.server).http_url

    @property
    def grpc_url(self) -> str:
        return (self.gateway or self.server).grpc_url

    @property
    def metrics_url(self) -> str:
        """The address of the metrics of all parts of the service."""
        raise NotImplementedError

    def start(self, server: TritonServer, *, cancelled: Callable[[], bool]) -> None:
        """Start the server and what belongs to it, and wait until all is ready, or until ``cancelled`` returns True.

        Errors: those of `TritonServer.start`, and of `Gateway.start` with a gateway.
        """
        raise NotImplementedError

    def run(self, stopped: Callable[[], bool]) -> None:
        """Watch all parts until ``stopped`` returns True.  Errors: ServerError when a part does not stay alive."""
        raise NotImplementedError

    def stop(self) -> None:
        """Complete the requests in progress, and end all parts.  It may be called again."""
        raise NotImplementedError

    def kill_now(self) -> None:
        """Kill all parts at once.  A signal handler may call `kill_now`; call `stop` afterwards to clean up."""
        raise NotImplementedError


class BareService(Service):
    """A server without a gateway."""

    def __init__(self, options: ServerOptions, *, on_log_line: Callable[[str], None] | None = None) -> None:
        self.server_options = replace(options, metrics_host=_LOOPBACK, metrics_port=0)
        self._options = options
        self._opened = ExitStack()
        self._endpoint: MetricsEndpoint | None = None
        self._supervisor: Supervisor | None = None

    @property
    def metrics_url(self) -> str:
        return self._endpoint.url if self._endpoint is not None else ""

    def start(self, server: TritonServer, *, cancelled: Callable[[], bool]) -> None:
        self.server = server
        self._supervisor = Supervisor(server)
        server.check_repository()  # a mistake in the path is named before a port that is in use
        self._endpoint = MetricsEndpoint(self._options.host, self._options.metrics_port, self._metrics_text)
        self._opened.callback(self._endpoint.close)
        self._opened.callback(server.stop)
        server.start(cancelled=cancelled)

    def _metrics_text(self) -> str:
        return filesystem_metrics() + (self._supervisor.metrics_text() if self._supervisor is not None else "")

    def run(self, stopped: Callable[[], bool]) -> None:
        if self._supervisor is not None:
            self._supervisor.run(stopped)

    def stop(self) -> None:
        self._opened.close()

    def kill_now(self) -> None:
        if self._supervisor is not None:
            self._supervisor.server.kill_now()


class GatewayService(Service):
    """A server on loopback, with HAProxy and the front before it."""

    gateway: Gateway

    def __init__(
        self,
        options: ServerOptions,
        settings: GatewaySettings,
        *,
        on_log_line: Callable[[str], None] | None = None,
        on_gateway_line: Callable[[str], None] | None = None,
    ) -> None:
        """Check keys, certificate and ports.  Errors: those of `Gateway`."""
        self.gateway = Gateway(
            settings,
            http_port=options.http_port,
            grpc_port=options.grpc_port,
            metrics_port=options.metrics_port,
            on_log_line=on_gateway_line,
        )
        self.server_options = behind_gateway(options, self.gateway.admin_secret)
        self._note = on_gateway_line or (lambda line: None)
        self._opened = ExitStack()
        self._opened.callback(self.gateway.stop)
        self._supervisor: Supervisor | None = None
        self.front: FrontKeeper | None = None

    @property
    def metrics_url(self) -> str:
        return self.gateway.metrics_url

    def start(self, server: TritonServer, *, cancelled: Callable[[], bool]) -> None:
        self.server = server
        self._supervisor = Supervisor(server)
        self._opened.callback(server.stop)  # after front and gateway, so that requests in progress reach the server
        server.start(cancelled=cancelled)
        if cancelled():
            return
        self.front = started_front(self.gateway, server, note=self._note, cancelled=cancelled)
        if self.front is not None:
            self._opened.callback(self.front.stop)
        self._opened.callback(self.gateway.stop)
        sources = {"supervisor": self._supervisor.metrics.text, **metric_sources(self.gateway)}
        if self.front is not None:
            sources["front"] = self.front.metrics_text
        self.gateway.start(server, front=self.front.front if self.front else None, sources=sources)

    def run(self, stopped: Callable[[], bool]) -> None:
        if self._supervisor is not None:
            self._supervisor.run(lambda: stopped() or self._step())

    def _step(self) -> bool:
        self.gateway.step()
        if self.front is not None:
            self.front.step()
        return False

    def stop(self) -> None:
        self._opened.close()

    def kill_now(self) -> None:
        self.gateway.kill_now()
        if self._supervisor is not None:
            self._supervisor.server.kill_now()


def metric_sources(gateway: Gateway) -> dict[str, Callable[[], str]]:
    """Return the sources of a service's metrics that are no part of it: the file systems that it writes to."""
    log = gateway.settings.access_log
    return {"filesystems": partial(filesystem_metrics, () if log is None else (log.absolute().parent,))}


def started_front(
    gateway: Gateway,
    server: TritonServer,
    *,
    note: Callable[[str], None],
    cancelled: Callable[[], bool] = lambda: False,
) -> FrontKeeper | None:
    """Start the front of a ready server, and wait until it answers, or until ``cancelled`` returns True.

    Returns None if no model takes encoded images, a running gateway has no place for a front, or a package of the front
    is not installed; ``note`` gets the reason.
    Errors: ServerError when the front does not start.
    """
    model = read_models(server.repository).ensemble
    if not model:
        note("front: POST /classify is not offered: no model of the repository takes encoded images")
        return None
    if gateway.places is not None and not gateway.places.with_fronts:
        note("front: POST /classify is not offered before a restart of the service: the first bundle takes no images")
        return None
    bounds = queue_bounds(gateway.settings, server.repository)
    try:
        keeper = FrontKeeper(
            server.grpc_url, model, gateway.settings, bounds=bounds, secret=gateway.front_secret, on_log_line=note
        )
    except MissingDependencyError as exc:
        note(f"front: POST /classify is not offered: {exc}")
        return None
    try:
        keeper.wait_ready(cancelled)
    except BaseException:
        keeper.stop()
        raise
    return keeper


class FrontKeeper:
    """Keeps a front running on a port: starts the front again when it has ended.

    port: the port on 127.0.0.1.
    restarts: how often the front was started again.
    """

    def __init__(
        self,
        triton_url: str,
        model: str,
        settings: GatewaySettings,
        *,
        bounds: tuple[int, int],
        secret: str,
        on_log_line: Callable[[str], None],
    ) -> None:
        """Start the front.

        triton_url: the gRPC address of the server.  model: the ensemble that takes encoded images.
        bounds: (requests in flight, timeout in ms) of the gateway's queue, which lets no more requests through.
        secret: the value of `FRONT_HEADER` in each request from the gateway.
        Errors: MissingDependencyError when a package of the extra ``serve`` is not installed.
        """
        self._secret = secret
        self._options = FrontOptions(
            triton_url=triton_url,
            model=model,
            max_body_bytes=settings.max_body_bytes,
            max_buffered_bytes=max(DEFAULT_BUFFERED_BYTES, settings.max_body_bytes),
            max_requests=bounds[0] + settings.queue_limit,
            max_running=bounds[0],
            queue_timeout_s=bounds[1] / 1000,
        )
        self._note = on_log_line
        self.restarts = 0
        self._front: FrontProcess = start_front(self._options, secret)
        self.port = self._front.port

    @property
    def front(self) -> Front:
        """What the gateway must know about the front."""
        return Front(port=self.port, secret=self._secret, model=self._options.model)

    def wait_ready(self, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Wait until the front answers, or ``cancelled`` returns True.  Errors: ServerError when it does not start."""
        self._front.wait_ready(cancelled=cancelled)

    def step(self) -> None:
        """Start the front again if it has ended; call it often.  Errors: ServerError when it ends again and again."""
        status = self._front.poll()
        if status is None:
            return
        self.restarts += 1
        if self.restarts > _MOST_FRONT_RESTARTS:
            raise ServerError(f"the front ended {self.restarts} times, the last time with exit status {status}")
        self._note(f"front: ended with exit status {status}, and is started again")
        self._front = start_front(self._options, self._secret, port=self.port)

    @property
    def pid(self) -> int:
        return self._front.pid

    def metrics_text(self) -> str:
        """Return the number of restarts, in Prometheus's text format."""
        meaning = "Times that the front had ended and was started again"
        return metric_text("gmmvit_front_restarts_total", "counter", meaning, [("", self.restarts)])

    def stop(self) -> None:
        self._front.stop()
