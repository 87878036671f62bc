"""Read the address of a Triton server: protocol, host and port, and whether the connection uses TLS."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from gmmvit_deploy.errors import InputError

__all__ = ["ServerUrl", "parse_url", "protocol_of"]

_PORTS = {"http": 8000, "grpc": 8001, "https": 443, "grpcs": 443}
"""Scheme → default port: Triton's own ports, and the port of HTTPS for a connection with TLS."""


class ServerUrl(NamedTuple):
    """A server's address.  address: ``host:port``.  tls: True for ``https://`` and ``grpcs://``."""

    protocol: Literal["grpc", "http"]
    address: str
    tls: bool

    @property
    def is_loopback(self) -> bool:
        """True if the host is this machine, so that requests leave no network interface."""
        return re.match(r"(localhost|127\.[\d.]+|\[::1\]):", self.address) is not None


def parse_url(url: str) -> ServerUrl:
    """Split a server's address: ``grpc://host:port`` or ``http://host:port``; with TLS, ``grpcs://`` or ``https://``.

    The default port is 8001 for gRPC, 8000 for HTTP, and 443 with TLS.
    Errors: InputError when the address has another form.
    """
    match = re.fullmatch(r"(grpcs?|https?)://(\[[0-9a-fA-F:]+\]|[^:/\[\]]+)(?::(\d{1,5}))?/?", url)
    if match is None:
        raise InputError(
            f"{url!r} is not a server address",
            hint="type grpc://HOST:PORT or http://HOST:PORT, for example grpc://localhost:8001; with TLS, "
            "grpcs://HOST:PORT or https://HOST:PORT",
        )
    scheme = match.group(1)
    return ServerUrl(
        protocol="grpc" if scheme.startswith("grpc") else "http",
        address=f"{match.group(2)}:{match.group(3) or _PORTS[scheme]}",
        tls=scheme.endswith("s"),
    )


def protocol_of(url: str) -> str:
    """Return ``grpc`` or ``http``, with or without TLS; for any other address, the text before its first colon."""
    scheme = url.partition(":")[0]
    return scheme.removesuffix("s") if scheme in _PORTS else scheme
