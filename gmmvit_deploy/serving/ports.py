"""Choose and check the ports of a server before the server starts."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from gmmvit_deploy.errors import ServerError

__all__ = ["free_ports", "listening_socket"]


def free_ports(services: Mapping[str, tuple[str, int]]) -> tuple[int, ...]:
    """Return the port of each service; a free port for 0.

    services: name of the service, as in the option ``--NAME-port`` → (address to listen on, port).
    Errors: ServerError when a port cannot be opened.
    """
    probes: list[socket.socket] = []
    try:
        for service, (host, port) in services.items():
            probes.append(listening_socket(host, port, service))
        return tuple(probe.getsockname()[1] for probe in probes)
    finally:
        for probe in probes:
            probe.close()


def listening_socket(host: str, port: int, service: str) -> socket.socket:
    """Listen on a port.

    service: the name of the service, for the message.
    Errors: ServerError when the port is in use, or when the address is not an address of this machine.
    """
    if not 0 <= port <= 65535:
        raise ServerError(f"{service} port: expected a number from 0 to 65535, got {port}")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        probe = socket.socket(family, kind)
    except OSError as exc:
        raise ServerError(f"host {host}: the server cannot listen on this address: {exc.strerror or exc}") from exc
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen()
    except OSError as exc:
        probe.close()
        raise ServerError(
            f"{service} port {port} on {host} cannot be opened: {exc.strerror}",
            hint=f"stop the program that uses the port, or choose another port with --{service.lower()}-port; "
            "0 means any free port",
        ) from exc
    return probe
