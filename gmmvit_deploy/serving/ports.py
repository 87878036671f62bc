"""Choose and check the ports of a server before the server starts."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress

from gmmvit_deploy.arguments import Refusals
from gmmvit_deploy.errors import ServerError

_WITH_OPTION = ("HTTP", "gRPC", "metrics", "classify")
"""The services whose port an option of the command line gives."""

_OF_SERVERS = range(10_000, 32_768)
"""Ports that Linux gives to no connection of a client, unless ``net.ipv4.ip_local_port_range`` is changed: one that is
free now is free when the server opens it seconds later, and when the server starts again."""


def free_ports(services: Mapping[str, tuple[str, int]]) -> tuple[int, ...]:
    """Return the port of each service; a free port for 0.

    services: name of the service, as in the option ``--NAME-port`` → (address to listen on, port).
    Errors: ServerError that names every port that cannot be opened.
    """
    candidates = iter(random.sample(_OF_SERVERS, 20 * len(services)))
    chosen = {name: (host, port or _free_port(host, candidates)) for name, (host, port) in services.items()}
    with ExitStack() as opened:
        listeners = [opened.enter_context(listener) for listener in listening_sockets(chosen).values()]
        return tuple(listener.getsockname()[1] for listener in listeners)


def _free_port(host: str, candidates: Iterator[int]) -> int:
    """Return the first port on which nothing listens; 0 without one, as for an address of another machine."""
    for port in candidates:
        with suppress(ServerError), listening_socket(host, port, ""):
            return port
    return 0


def listening_sockets(services: Mapping[str, tuple[str, int]], *, option: str = "--host") -> dict[str, socket.socket]:
    """Listen on the port of each service.  services, errors: as for `free_ports`; option: as for `listening_socket`."""
    refusals, listeners = Refusals(), {}
    with ExitStack() as opened:
        for name, (host, port) in services.items():
            with refusals.collected():
                listeners[name] = opened.enter_context(listening_socket(host, port, name, option=option))
        refusals.raise_all()
        opened.pop_all()
    return listeners


def listening_socket(host: str, port: int, service: str, *, option: str = "--host") -> socket.socket:
    """Listen on a port.

    service: the name of the service, for the message.  option: the option that gives ``host``, for the message.
    Errors: ServerError when the port is in use, or when the address is not an address of this machine.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
    except OSError as exc:
        raise ServerError(
            f"{option} {host}: the server cannot listen on this address: {exc.strerror or exc}",
            hint=f"type {option} and an address of this machine; 0.0.0.0 means all addresses",
        ) from exc
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
    except OSError as exc:
        listener.close()
        another = f"another port with --{service.lower()}-port" if service in _WITH_OPTION else "another port"
        if exc.errno == errno.EADDRNOTAVAIL:
            raise ServerError(
                f"{option} {host}: this address is not an address of this machine",
                hint=f"type {option} and an address of this machine (ip address lists them); 0.0.0.0 means all",
            ) from exc
        raise ServerError(
            f"{service} port {port} on {host} cannot be opened: {exc.strerror}",
            hint=f"stop the program that uses the port, or choose {another}; 0 means any free port",
        ) from exc
    return listener
