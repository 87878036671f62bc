"""Open the sockets on which HAProxy listens.

HAProxy inherits the sockets: a port is not lost between the choice of a free port and the start of HAProxy, and
connections wait while a HAProxy that has ended is started again.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from gmmvit_deploy.serving.ports import listening_socket

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
            opened[service] = listening_socket(host, port, service, option="--listen", backlog=_BACKLOG)
    except BaseException:
        for listener in opened.values():
            listener.close()
        raise
    return opened
