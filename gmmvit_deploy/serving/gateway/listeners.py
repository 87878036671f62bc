"""Open the sockets on which HAProxy listens.

HAProxy inherits the sockets: a port is not lost between the choice of a free port and the start of HAProxy, and
connections wait while a HAProxy that has ended is started again.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from gmmvit_deploy.errors import ServerError

__all__ = ["opened_listeners"]

_BACKLOG = 1024


def opened_listeners(host: str, ports: Mapping[str, int]) -> dict[str, socket.socket]:
    """Return service → listening socket on ``host``.

    ports: service, such as HTTP → port; 0 means any free port.
    Errors: ServerError when a port cannot be opened; then no socket stays open.
    """
    opened: dict[str, socket.socket] = {}
    try:
        for service, port in ports.items():
            opened[service] = _listener(host, port, service)
    except BaseException:
        for listener in opened.values():
            listener.close()
        raise
    return opened


def _listener(host: str, port: int, service: str) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ServerError(f"{service} port: expected a number from 0 to 65535, got {port}")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
    except OSError as exc:
        raise ServerError(
            f"--listen {host}: the gateway cannot listen on this address: {exc.strerror or exc}",
            hint="type --listen and an address of this machine; 0.0.0.0 means all addresses",
        ) from exc
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as exc:
        listener.close()
        raise ServerError(
            f"{service} port {port} on {host} cannot be opened: {exc.strerror}",
            hint=f"stop the program that uses the port, or choose another port with --{service.lower()}-port; "
            "0 means any free port",
        ) from exc
    return listener
