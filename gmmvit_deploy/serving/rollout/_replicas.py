"""The servers of a service, behind the gateway: the served server, and during a rollout a new server beside it.

The gateway knows two places, ``blue`` and ``green``. The served server takes a place; during a rollout, the new server
takes the other place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.files.leftovers import temporary_folder
from gmmvit_deploy.serving._replica import Replica
from gmmvit_deploy.serving.chosen import options_for_server
from gmmvit_deploy.serving.gateway.options import PLACES, Front
from gmmvit_deploy.serving.gateway.places import Places
from gmmvit_deploy.serving.gateway.service import Gateway
from gmmvit_deploy.serving.installs import ServerInstall
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer

_WEIGHT = 256
"""HAProxy's weight of the server that gets the requests; the other has 0."""
_POLL_S = 0.05
_SERVES_S = 15.0
"""The maximum time in which a HAProxy that is started again passes requests to the new server."""
_DRAIN_S = 95.0
"""The maximum time of a request in the gateway: images that arrive slowly, and their answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """A running server in a place of the gateway.  resources: ends the server, and removes its files."""

    place: str
    bundle: Bundle
    replica: Replica
    resources: ExitStack


class Replicas:
    """The old server of a service, and during a rollout the new server beside it.

    Servers are started by the threads that call `start_first` and `start_new`; these threads must live as long as the
    service, because Linux ends a server when the thread that started it ends.
    """

    def __init__(
        self,
        gateway: Gateway,
        install: ServerInstall,
        options: ServerOptions,
        written: RepositoryOptions,
        *,
        runner: str | None,
        note: Callable[[str], None],
        on_log_line: Callable[[str], None] | None = None,
    ) -> None:
        """options: of the servers behind the gateway, with free ports of loopback.  written: of their repositories.

        runner: of the network, ``NAME[:PRECISION]``; None takes each bundle's choice for this machine.
        note: called with what an operator should know.
        """
        self._gateway, self._install, self._options = gateway, install, options
        self._written, self._runner, self._note, self._on_log_line = written, runner, note, on_log_line
        self._lock = threading.RLock()  # held while a server restarts or ends
        self._old: _Placed | None = None
        self._new: _Placed | None = None
        self._new_death = ""

    @property
    def _places(self) -> Places:
        if self._gateway.places is None:
            raise ServerError("the gateway is not running")
        return self._gateway.places

    @property
    def served(self) -> Bundle:
        """The bundle of the old server."""
        return self._served().bundle

    @property
    def server(self) -> TritonServer:
        """The served server."""
        return self._served().replica.server

    @property
    def front(self) -> Front | None:
        """The service behind ``/classify`` of the served server."""
        keeper = self._served().replica.front
        return keeper.front if keeper is not None else None

    def start_first(self, bundle: Bundle, *, cancelled: Callable[[], bool]) -> None:
        """Start the first server of the service.  Errors: those of `TritonServer.start` and of the repository."""
        self._old = self._started(PLACES[0], bundle, cancelled)

    def start_new(self, bundle: Bundle, aborted: Callable[[], bool]) -> None:
        """Start the new server, without traffic, and wait until it is ready.  Errors: ServerError."""
        place = next(place for place in PLACES if place != self._served().place)
        placed = self._started(place, bundle, aborted)
        with self._lock:
            self._new, self._new_death = placed, ""
        if aborted():
            return
        replica = placed.replica
        self._gateway.serve([self.server.models, replica.server.models])
        self._places.put(place, replica.server, front_port=replica.front.port if replica.front else 0)

    def urls(self) -> tuple[str, str]:
        """Return the gRPC URLs of the old and of the new server."""
        return self._served().replica.server.grpc_url, self._begun().replica.server.grpc_url

    def switch(self) -> None:
        """Send all new requests to the new server."""
        self._places.set_weights({self._begun().place: _WEIGHT, self._served().place: 0})

    def death_of_new(self) -> str:
        """Return why the new server is dead; empty while it lives."""
        new = self._new
        if new is not None and not self._new_death:
            try:
                new.replica.server.require_running()
            except ServerError as exc:
                self._new_death = str(exc).partition("\n")[0]
        return self._new_death

    def require_serving(self) -> None:
        """Wait until the gateway passes requests to the new server.  Errors: ServerError when it does not."""
        new, deadline = self._begun(), time.monotonic() + _SERVES_S
        while not self._places.is_up(new.place):
            if time.monotonic() > deadline:
                raise ServerError(f"the gateway passed no request to the new server within {_SERVES_S:g} s")
            time.sleep(_POLL_S)

    def end_old(self) -> None:
        """End the old server when its requests are answered; the new server takes its place."""
        with self._lock:
            old, self._old, self._new = self._served(), self._begun(), None
        self._end(old)

    def end_new(self) -> None:
        """End the new server when its requests are answered; the old server gets all new requests."""
        new = self._new
        if new is None:
            return
        try:
            self._places.set_weights({self._served().place: _WEIGHT, new.place: 0})
        finally:
            try:
                self._end(new)
            finally:
                self._new = None

    def step(self, stopped: Callable[[], bool]) -> None:
        """Restart the served server if it is dead, and note the death of a new server; call it often.

        A new server is not restarted: its death ends the rollout.  Errors: ServerError when the served server stays
        dead.
        """
        with self._lock:
            if self._old is not None:
                self._old.replica.supervisor.step(stopped)
            for placed in (self._old, self._new):
                if placed is not None and placed.replica.front is not None:
                    placed.replica.front.step()
            if self._new is not None and not self._new_death:
                problem = self._new.replica.supervisor.look()
                self._new_death = problem[1] if problem else ""

    def metrics_text(self) -> str:
        """Return the metrics of the served server, of its supervisor and of its front."""
        return self._served().replica.metrics_text()

    def stop(self) -> None:
        """End both servers.  The gateway must have ended before."""
        with self._lock:
            both, self._old, self._new = (self._new, self._old), None, None
            for placed in both:
                if placed is not None:
                    placed.resources.close()

    def kill_now(self) -> None:
        """Kill both servers and their fronts at once.  A signal handler may call it; call `stop` afterwards."""
        for placed in (self._old, self._new):
            if placed is not None:
                placed.replica.kill_now()

    def _started(self, place: str, bundle: Bundle, cancelled: Callable[[], bool]) -> _Placed:
        with ExitStack() as opened:
            folder: Path = opened.enter_context(temporary_folder("repository"))
            options, notes = options_for_server(bundle, self._written, self._install, self._runner)
            repository = repository_from_bundle(bundle, folder / "models", options)
            for line in (*notes, f"runner: {repository.runner}"):
                self._note(line)
            on_line = self._on_log_line
            log = None if on_line is None else lambda line: on_line(f"{place}: {line}")
            server = TritonServer(repository.path, install=self._install, options=self._options, on_log_line=log)
            replica = Replica(server)
            opened.callback(replica.stop)
            replica.start(self._gateway, note=self._note, cancelled=cancelled)
            return _Placed(place=place, bundle=bundle, replica=replica, resources=opened.pop_all())

    def _end(self, ended: _Placed) -> None:
        """Wait until the gateway has no request for the server, then end the server."""
        deadline = time.monotonic() + _DRAIN_S
        try:
            while (self._gateway.leaving or self._places.in_progress(ended.place)) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            self._places.free(ended.place)
            self._gateway.serve([self.server.models])
        finally:
            with self._lock:
                ended.resources.close()

    def _served(self) -> _Placed:
        if self._old is None:
            raise ServerError("the service has no server; it is starting or ending")
        return self._old

    def _begun(self) -> _Placed:
        if self._new is None:
            raise ServerError("the service has no new server")
        return self._new
