"""A blue-green deployment: the served server of a service, and during a rollout a new server beside it.

The gateway knows two servers by the names ``blue`` and ``green``; the new server takes the name that is not in use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.files.leftovers import temporary_folder
from gmmvit_deploy.serving.gateway.gateway import Gateway
from gmmvit_deploy.serving.gateway.options import BLUE, GREEN
from gmmvit_deploy.serving.gateway.upstreams import Upstreams
from gmmvit_deploy.serving.run import BundleServers
from gmmvit_deploy.serving.server import TritonServer
from gmmvit_deploy.serving.service import Replica, Service

_WEIGHT = 256
"""HAProxy's weight of the server that gets the requests; the other has 0."""
_POLL_S = 0.05
_SERVES_S = 15.0
"""The maximum time in which a HAProxy that is started again passes requests to the new server."""
_DRAIN_S = 95.0
"""The maximum time of a request in the gateway: images that arrive slowly, and their answer."""


class BlueGreen:
    """Replaces the server of a service by a server with other bundles.

    served: name of each model → its bundle, of the served server.
    The threads that call `start_first` and `start_new` must live as long as the service, because Linux ends a server
    when the thread that started it ends.
    """

    def __init__(self, service: Service, servers: BundleServers, bundles: Mapping[str, Bundle]) -> None:
        """service: with a gateway, not started.  bundles: to serve first."""
        self._service, self._servers, self.served = service, servers, bundles
        self._new_bundles = bundles

    @property
    def _gateway(self) -> Gateway:
        if self._service.gateway is None:
            raise ServerError("the service has no gateway")
        return self._service.gateway

    @property
    def _upstreams(self) -> Upstreams:
        if self._gateway.upstreams is None:
            raise ServerError("the gateway is not running")
        return self._gateway.upstreams

    def _new(self) -> Replica:
        if self._service.new is None:
            raise ServerError("the service has no new server")
        return self._service.new

    def start_first(self, *, cancelled: Callable[[], bool], sources: Mapping[str, Callable[[], str]]) -> None:
        """Start the service with the first server.  Errors: those of `Service.start` and of the repository."""
        server, files = self._server(BLUE, self.served)
        self._service.start(server, cancelled=cancelled, rollouts=True, files=files, sources=sources)

    def start_new(self, bundles: Mapping[str, Bundle], aborted: Callable[[], bool]) -> None:
        """Start the new server, without traffic, and wait until it is ready.  Errors: ServerError."""
        name = GREEN if self._service.served().name == BLUE else BLUE
        server, files = self._server(name, bundles)
        new = Replica(server, name=name, files=files)
        try:
            new.start(self._gateway, note=self._service.note, cancelled=aborted)
        except BaseException:
            new.stop()
            raise
        with self._service.lock:
            self._service.new, self._new_bundles = new, bundles
        if aborted():
            return
        self._gateway.serve([self._service.server.models, server.models])
        self._upstreams.put(name, server, front_port=new.front.port if new.front else 0)

    def _server(self, name: str, bundles: Mapping[str, Bundle]) -> tuple[TritonServer, ExitStack]:
        """Return (a server that is not started, what removes its repository)."""
        with ExitStack() as files:
            folder = files.enter_context(temporary_folder("repository"))
            server = self._servers.make(bundles, folder, name=name)
            for network in server.models.networks:
                model = f"{network.name}: " if len(bundles) > 1 else ""
                self._service.note(f"runner: {model}{network.runner}")
            return server, files.pop_all()

    def urls(self) -> tuple[str, str]:
        """Return the gRPC URLs of the old and of the new server."""
        return self._service.server.grpc_url, self._new().server.grpc_url

    def switch(self) -> None:
        """Send all new requests to the new server, and wait until the gateway does.  Errors: ServerError."""
        new, deadline = self._new().name, time.monotonic() + _SERVES_S
        self._upstreams.set_weights({new: _WEIGHT, self._service.served().name: 0})
        while not self._upstreams.is_up(new):
            if time.monotonic() > deadline:
                raise ServerError(f"the gateway passed no request to the new server within {_SERVES_S:g} s")
            time.sleep(_POLL_S)

    def death_of_new(self) -> str:
        """Return why the new server is dead; "" while it lives."""
        new = self._service.new
        if new is None or new.death:
            return "" if new is None else new.death
        try:
            new.server.require_running()
        except ServerError as exc:
            return str(exc).partition("\n")[0]
        return ""

    def end_old(self) -> None:
        """End the old server when its requests are answered; the new server takes its place."""
        service = self._service
        with service.lock:
            old, service.replica, service.new = service.served(), self._new(), None
            self.served = self._new_bundles
        self._end(old)

    def end_new(self) -> None:
        """End the new server when its requests are answered; the old server gets all new requests."""
        service = self._service
        new = service.new
        if new is None:
            return
        try:
            self._upstreams.set_weights({service.served().name: _WEIGHT, new.name: 0})
        finally:
            self._end(new)

    def _end(self, ended: Replica) -> None:
        """Wait until the gateway has no request for the server, then end the server."""
        deadline = time.monotonic() + _DRAIN_S
        try:
            while (self._gateway.leaving or self._upstreams.in_progress(ended.name)) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            self._upstreams.remove(ended.name)
            self._gateway.serve([self._service.server.models])
        finally:
            with self._service.lock:
                if self._service.new is ended:
                    self._service.new = None
                ended.stop()
