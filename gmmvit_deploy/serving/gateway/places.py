"""The places for servers behind a running HAProxy: change which servers get requests, without a restart of HAProxy.

Places.put(…)          a server takes a place, without requests
Places.set_weights(…)  share the requests among the places
Places.in_progress(…)  how many requests a place has
Places.free(…)         the place gets no connection any more
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import replace

from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.serving.gateway.haproxy import HAProxy
from gmmvit_deploy.serving.gateway.options import PLACES, GatewayFiles, Upstream
from gmmvit_deploy.serving.server import TritonServer

__all__ = ["Places", "first_upstreams"]

_BACKENDS = ("triton_http", "triton_grpc")
_NOWHERE = "127.0.0.1:1"
"""The address of a free place; nothing is sent to it."""


def first_upstreams(server: TritonServer, bundle: str, *, rollouts: bool) -> tuple[Upstream, ...]:
    """Return the servers with which the gateway starts.

    rollouts: True for two places, of which the second is free.
    """
    if not rollouts:
        return (_upstream("triton", server, bundle),)
    free = Upstream(name=PLACES[1], http=_NOWHERE, grpc=_NOWHERE, metrics=_NOWHERE, bundle="", weight=0)
    return _upstream(PLACES[0], server, bundle), free


class Places:
    """The places of a running HAProxy.

    upstreams: the servers in the places, as a HAProxy that is started again must know them.
    """

    def __init__(self, haproxy: HAProxy, upstreams: tuple[Upstream, ...]) -> None:
        self._haproxy = haproxy
        self._upstreams = {upstream.name: upstream for upstream in upstreams}

    @property
    def upstreams(self) -> tuple[Upstream, ...]:
        return tuple(self._upstreams.values())

    def put(self, name: str, server: TritonServer, bundle: str) -> None:
        """Let a ready server take a place, without requests.

        bundle: the SHA-256 of the server's bundle, which every answer of the server states.
        Errors: ServerError when HAProxy refuses a command.
        """
        self._upstreams[name] = replace(_upstream(name, server, bundle), weight=0)
        self._set_bundle(name, bundle)
        for backend, port in zip(_BACKENDS, (server.http_port, server.grpc_port), strict=True):
            self._command(f"set server {backend}/{name} addr {server.options.host} port {port}", expected="")
            self._command(f"set weight {backend}/{name} 0")
            self._command(f"set server {backend}/{name} state ready")
        self._command(f"set server {_BACKENDS[0]}/{name} health up")

    def set_weights(self, weights: Mapping[str, int]) -> None:
        """Share new requests among places in proportion to their weights, 0 to 256.

        A place whose weight rises is set first, so that some place always gets requests.
        Errors: ServerError when HAProxy refuses a command.
        """
        for name, weight in sorted(weights.items(), key=lambda item: -item[1]):
            self._upstreams[name] = replace(self._upstreams[name], weight=weight)
            for backend in _BACKENDS:
                self._command(f"set weight {backend}/{name} {weight}")

    def in_progress(self, name: str) -> int:
        """Return the number of requests of both protocols that the place works on, or that wait for it."""
        rows = csv.DictReader(io.StringIO(self._haproxy.command("show stat").lstrip("# ")))
        mine = [row for row in rows if row["pxname"] in _BACKENDS and row["svname"] == name]
        return sum(int(row[field] or 0) for row in mine for field in ("scur", "qcur"))

    def free(self, name: str) -> None:
        """Close the connections to a place that has no requests.  Errors: ServerError."""
        for backend in _BACKENDS:
            self._command(f"set server {backend}/{name} state maint")
        self._upstreams[name] = replace(self._upstreams[name], http=_NOWHERE, grpc=_NOWHERE, metrics=_NOWHERE, weight=0)

    def _set_bundle(self, name: str, bundle: str) -> None:
        files = GatewayFiles()
        self._haproxy.command(f"del map {files.bundles} {name}")  # a place that was never used has no entry
        self._command(f"add map {files.bundles} {name} {bundle}")

    def _command(self, text: str, *, expected: str | None = None) -> None:
        """Send a command.  expected: a part of the answer; None means that the answer must be empty."""
        answer = self._haproxy.command(text)
        if answer and expected is None:
            raise ServerError(f"HAProxy refuses the command {text!r}: {answer}")
        lost = any(word in answer.lower() for word in ("no such", "invalid", "unknown", "require"))
        if expected is not None and lost:
            raise ServerError(f"HAProxy refuses the command {text!r}: {answer}")


def _upstream(name: str, server: TritonServer, bundle: str) -> Upstream:
    host = server.options.host
    return Upstream(
        name=name,
        http=f"{host}:{server.http_port}",
        grpc=f"{host}:{server.grpc_port}",
        metrics=f"{host}:{server.metrics_port}",
        bundle=bundle,
    )
