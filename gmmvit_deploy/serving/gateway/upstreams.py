"""The servers behind a running HAProxy: change which of them get requests, without a restart of HAProxy."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Mapping
from dataclasses import replace

from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.serving.gateway.haproxy import HAProxy
from gmmvit_deploy.serving.gateway.options import BLUE, GREEN, UNUSED_ADDRESS, Front, Upstream
from gmmvit_deploy.serving.server import TritonServer

_BACKENDS = ("triton_http", "triton_grpc")
_FRONT = "front"
"""The backend of the services behind ``/classify``, one for each server."""
_RETRY_S = 15.0
"""The maximum time in which a HAProxy that has ended is started again."""
_POLL_S = 0.05


def first_upstreams(server: TritonServer, *, front: Front | None = None, rollouts: bool) -> tuple[Upstream, ...]:
    """Return the servers with which the gateway starts.  rollouts: True for a second, unused server."""
    port = front.port if front is not None else 0
    if not rollouts:
        return (_upstream("triton", server, port),)
    unused = Upstream(name=GREEN, http=UNUSED_ADDRESS, grpc=UNUSED_ADDRESS, metrics=UNUSED_ADDRESS, bundle="", weight=0)
    return _upstream(BLUE, server, port), unused


class Upstreams:
    """The servers behind a running HAProxy, by name.

    Each method notes what a HAProxy that is started again must know, and then sends commands; while HAProxy does not
    answer, it repeats them for 15 s.  Errors of every method: ServerError when HAProxy refuses a command.

    front, with_fronts: True if HAProxy passes images to the fronts of the servers.
    """

    def __init__(self, haproxy: HAProxy, upstreams: tuple[Upstream, ...], *, front: bool) -> None:
        self._haproxy = haproxy
        self.with_fronts = front
        self._backends = (*_BACKENDS, _FRONT) if front else _BACKENDS
        self._upstreams = {upstream.name: upstream for upstream in upstreams}

    @property
    def current(self) -> tuple[Upstream, ...]:
        return tuple(self._upstreams.values())

    def put(self, name: str, server: TritonServer, *, front_port: int = 0) -> None:
        """Register a ready server, without requests.  front_port: of its front, or 0."""
        self._upstreams[name] = replace(_upstream(name, server, front_port), weight=0)
        for stated, value in (("bundles.map", server.models.bundle), ("runners.map", server.models.runner)):
            self._answer(f"del map {stated} {name}")  # a name that was never used has no entry
            if value:  # the same for all models
                self._command(f"add map {stated} {name} {value}")
        ports = (server.http_port, server.grpc_port, front_port)
        for backend, port in zip(self._backends, ports, strict=False):
            if port == 0:
                continue  # it stays in maintenance: this server answers no images
            self._command(f"set server {backend}/{name} addr {server.options.host} port {port}", silent=False)
            self._command(f"set weight {backend}/{name} 0")
            self._command(f"set server {backend}/{name} state ready")
        self._command(f"set server {_BACKENDS[0]}/{name} health up")

    def set_weights(self, weights: Mapping[str, int]) -> None:
        """Share new requests among servers in proportion to their weights, 0 to 256."""
        # The largest weight first, so that some server always gets requests.
        for name, weight in sorted(weights.items(), key=lambda item: -item[1]):
            self._upstreams[name] = replace(self._upstreams[name], weight=weight)
            for backend in self._backends:
                self._command(f"set weight {backend}/{name} {weight}")

    def in_progress(self, name: str) -> int:
        """Return the number of requests that the server works on, or that wait for it."""
        return sum(int(row[field] or 0) for row in self._rows(name) for field in ("scur", "qcur"))

    def is_up(self, name: str) -> bool:
        """Return whether HAProxy passes requests of all kinds to the server."""
        backends = self._backends if self._upstreams[name].front else _BACKENDS
        rows = [row for row in self._rows(name) if row["pxname"] in backends]
        return len(rows) == len(backends) and all(
            row["status"].startswith("UP") and int(row["weight"] or 0) > 0 for row in rows
        )

    def remove(self, name: str) -> None:
        """Close the connections to a server that has no requests."""
        for backend in self._backends:
            self._command(f"set server {backend}/{name} state maint")
        self._upstreams[name] = replace(
            self._upstreams[name], http=UNUSED_ADDRESS, grpc=UNUSED_ADDRESS, metrics=UNUSED_ADDRESS, front="", weight=0
        )

    def _command(self, text: str, *, silent: bool = True) -> None:
        """Send a command.  silent: True if HAProxy answers this command only with an error."""
        answer = self._answer(text)
        words = ("no such", "invalid", "unknown", "require")
        if answer and (silent or any(word in answer.lower() for word in words)):
            raise ServerError(f"HAProxy refuses the command {text!r}: {answer}")

    def _rows(self, name: str) -> list[dict[str, str]]:
        rows = csv.DictReader(io.StringIO(self._answer("show stat").lstrip("# ")))
        return [row for row in rows if row["pxname"] in self._backends and row["svname"] == name]

    def _answer(self, text: str) -> str:
        deadline = time.monotonic() + _RETRY_S
        while True:
            try:
                return self._haproxy.command(text)
            except ServerError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_S)


def _upstream(name: str, server: TritonServer, front_port: int) -> Upstream:
    host = server.options.host
    return Upstream(
        name=name,
        http=f"{host}:{server.http_port}",
        grpc=f"{host}:{server.grpc_port}",
        metrics=f"{host}:{server.metrics_port}",
        bundle=server.models.bundle,
        runner=server.models.runner,
        front=f"{host}:{front_port}" if front_port else "",
    )
