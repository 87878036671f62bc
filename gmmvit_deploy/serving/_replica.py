"""A Triton server that is kept running, with the front that answers ``POST /classify`` from it."""

from __future__ import annotations

import socket
from collections.abc import Callable

from gmmvit_deploy.errors import MissingDependencyError
from gmmvit_deploy.serving._supervisor import Supervisor
from gmmvit_deploy.serving.front.options import DEFAULT_BODY_BYTES, DEFAULT_BUFFERED_BYTES, FrontOptions
from gmmvit_deploy.serving.front.process import FrontProcess
from gmmvit_deploy.serving.gateway.service import Gateway
from gmmvit_deploy.serving.server import TritonServer


class Replica:
    """A server with its supervisor and its front.

    front: None before `start`, and if no front is offered.
    """

    def __init__(self, server: TritonServer) -> None:
        self.server = server
        self.supervisor = Supervisor(server)
        self.front: FrontProcess | None = None

    def start(
        self,
        gateway: Gateway | None,
        *,
        note: Callable[[str], None],
        listener: socket.socket | None = None,
        cancelled: Callable[[], bool],
    ) -> None:
        """Start the server, then the front, and wait until both are ready, or until ``cancelled`` returns True.

        gateway: passes requests to both, or None.  listener: the socket of a front without a gateway; with neither,
        no front is started.  note: called with the reason why no front is offered.
        Errors: those of `TritonServer.start`; ServerError when the front does not start.
        """
        self.server.start(cancelled=cancelled)
        if (gateway is not None or listener is not None) and not cancelled():
            self.front = _started_front(gateway, self.server, listener=listener, note=note, cancelled=cancelled)

    def metrics_text(self) -> str:
        """Return the metrics of the server, of its supervisor and of the front, in Prometheus's text format."""
        return self.supervisor.metrics_text() + (self.front.metrics_text() if self.front is not None else "")

    def stop(self) -> None:
        """Complete the requests in progress, and end the front, then the server."""
        try:
            if self.front is not None:
                self.front.stop()
        finally:
            self.supervisor.close()
            self.server.stop()

    def kill_now(self) -> None:
        """Kill both at once.  A signal handler may call `kill_now`; call `stop` afterwards to clean up."""
        self.server.kill_now()
        if self.front is not None:
            self.front.kill_now()


def why_no_classify(server: TritonServer) -> str:
    """Return why a server has no model for ``POST /classify``; "" if there is one."""
    if not server.models.ensemble:
        return "no model of the repository takes encoded images"
    if not server.models.classifies:
        return "the model has no classes, only features"
    return ""


def _started_front(
    gateway: Gateway | None,
    server: TritonServer,
    *,
    note: Callable[[str], None],
    listener: socket.socket | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> FrontProcess | None:
    """Start the front of a ready server, and wait until it answers, or until ``cancelled`` returns True.

    listener: the socket of a front without a gateway.
    Returns None if no model takes encoded images, a running gateway has no place for a front, or a package of the front
    is not installed; ``note`` gets the reason.
    Errors: ServerError when the front does not start.
    """
    model = server.models.ensemble
    if not model:
        note("HTTP endpoint: POST /classify is not offered: no model of the repository takes encoded images")
        return None
    if gateway is not None and gateway.places is not None and not gateway.places.with_fronts:
        note("HTTP endpoint: POST /classify is not offered before a restart: the first bundle takes no images")
        return None
    body_bytes = DEFAULT_BODY_BYTES if gateway is None else gateway.settings.max_body_bytes
    options = FrontOptions(
        triton_url=server.grpc_url,
        model=model,
        max_body_bytes=body_bytes,
        max_buffered_bytes=max(DEFAULT_BUFFERED_BYTES, body_bytes),
    )
    secret = None if gateway is None else gateway.front_secret
    try:
        front = FrontProcess(options, secret, listener=listener, on_log_line=note)
    except MissingDependencyError as exc:
        note(f"HTTP endpoint: POST /classify is not offered: {exc}")
        return None
    try:
        front.wait_ready(cancelled=cancelled)
    except BaseException:
        front.stop()
        raise
    return front
