"""The options of the gateway: what the user chooses (`GatewaySettings`), and what HAProxy runs with (`GatewayOptions`).

HAProxy is the gateway: clients reach HAProxy only, and HAProxy passes on requests that a list allows to Triton.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.runtimes.programs.triton import DEFAULT_MODEL
from gmmvit_deploy.serving.front.options import DEFAULT_BODY_BYTES

CLIENT_HEADER = "x-gmmvit-client"
"""Header that the gateway adds to requests: the name of the client in the key file."""

BLUE, GREEN = "blue", "green"
"""The names of the two servers of a service with rollouts."""
UNUSED_ADDRESS = "127.0.0.1:1"
"""The address of a server that is not there; nothing is sent to it."""
MIN_BODY_BYTES = 1024
MAX_BODY_BYTES = 999_999_999
"""HAProxy compares lengths as signed numbers of 32 bits, so the gateway refuses a length of more than 9 digits."""
MAX_JSON_BYTES = 4 * 2**20
"""Triton reads nested JSON by recursion, about 100 bytes of its stack for each byte; its stack has 1 GiB."""
DEFAULT_IN_FLIGHT = 16
DEFAULT_QUEUE_LIMIT = 256
DEFAULT_QUEUE_TIMEOUT_MS = 250


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """A web service for clients without a client library: HTTP on a loopback port, behind the gateway.

    port: the port on 127.0.0.1 of the service that asks the first server.
    secret: the value of the header `FRONT_HEADER` in every request from the gateway.
    models: those that it answers with; a single one also on paths without a name.
    """

    port: int
    secret: str
    models: tuple[str, ...] = (DEFAULT_MODEL,)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """What the user chooses.

    keys: the key file, see `gateway._keys`.  listen: the address to listen on.
    tls_cert: PEM file of the certificate with its chain; None means no TLS.  tls_key: PEM file of the private key;
    None means that ``tls_cert`` also contains the private key.
    insecure: True permits an address other than loopback without TLS.
    max_body_bytes: the maximum size of a request.
    json_bytes: the maximum size of an inference request whose tensors are JSON; 0 refuses such requests.
    in_flight: the number of requests that Triton gets at the same time, for each of HTTP, gRPC and images; None: the
    measurement of ``gmmvit tune`` in the repository, or else 16.
    queue_limit: the number of requests that may wait in the gateway, all protocols together.
    queue_timeout_ms: the maximum time that a request waits; None means the latency limit of ``gmmvit tune``, else 250.
    access_log: the file to which a line of JSON is appended for each request; None means stderr.
    Errors: InputError when a value is invalid, or when keys would cross a network without TLS.
    """

    keys: Path
    listen: str = "127.0.0.1"
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    max_body_bytes: int = DEFAULT_BODY_BYTES
    json_bytes: int = 0
    in_flight: int | None = None
    queue_limit: int = DEFAULT_QUEUE_LIMIT
    queue_timeout_ms: int | None = None
    access_log: Path | None = None

    def __post_init__(self) -> None:
        minima = {
            "max_body_bytes": MIN_BODY_BYTES,
            "json_bytes": 0,
            "in_flight": 1,
            "queue_limit": 0,
            "queue_timeout_ms": 1,
        }
        for name, minimum in minima.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise InputError(f"{name}: expected at least {minimum}, got {value}")
        for name, maximum in {"max_body_bytes": MAX_BODY_BYTES, "json_bytes": MAX_JSON_BYTES}.items():
            if getattr(self, name) > maximum:
                raise InputError(f"{name}: expected at most {maximum}, got {getattr(self, name)}")
        if self.tls_key is not None and self.tls_cert is None:
            raise InputError("--tls-key needs --tls-cert", hint="add --tls-cert FILE, the certificate of this key")
        if self.tls_cert is None and not is_loopback(self.listen) and not self.insecure:
            raise InputError(
                f"--listen {self.listen} without TLS: keys and images would cross the network in plain text",
                hint="add --tls-cert FILE, or --insecure if another program in front of the gateway does TLS",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """A Triton server behind the gateway.

    name: of the server in the log and in the metrics.  bundle, runner: as in `ServedModels`.
    http, grpc, metrics: addresses in the form HOST:PORT.
    front: the address of the service behind ``/classify`` that asks this server, or "".
    weight: its share of the requests is weight / the sum of all weights, from 0 to 256.
    """

    name: str
    http: str
    grpc: str
    metrics: str
    bundle: str
    runner: str = ""
    front: str = ""
    weight: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """A request with which HAProxy checks a server.

    path: of the request.  body: of a POST; "" means a GET.  headers: of a POST.
    why_not: why the request does not run the network; "" if it does.
    """

    path: str
    body: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """What `gateway.files.config_text` writes into HAProxy's configuration.

    settings: what the user chose, with a number for ``in_flight`` and for ``queue_timeout_ms``.
    binds: ``HTTP``, ``gRPC`` and ``metrics`` → ADDRESS:PORT, or ``fd@N`` for a socket that the parent process opened.
    models: those that clients may use.  health: the requests with which HAProxy checks a server, at least one.
    buffer_bytes: the size of HAProxy's buffers. Only a request of at most this size may wait.
    threads: 0 means a thread for each core.
    front: the service behind ``/classify``; None refuses this path.
    access_log: the target of the log: ``stderr``, ``fd@N``, or the address of a syslog server.
    metrics_address: HOST:PORT of a server that answers ``/metrics`` with all metrics; "" leaves this path out.
    admin: (header, secret) that Triton requires for its statistics, or None.
    sockets: the folder of the sockets for commands at run time and for HAProxy's metrics; "" opens no sockets.
    """

    settings: GatewaySettings
    binds: Mapping[str, str]
    upstreams: tuple[Upstream, ...]
    models: tuple[str, ...]
    health: tuple[HealthCheck, ...]
    buffer_bytes: int = 128 * 1024
    threads: int = 0
    front: Front | None = None
    access_log: str = "stderr"
    metrics_address: str = ""
    admin: tuple[str, str] | None = None
    sockets: str = ""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``.  A name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def require_insecure(host: str, *, insecure: bool) -> None:
    """Refuse, with InputError, to serve without a gateway where other machines can ask, unless ``insecure``."""
    if not is_loopback(host) and not insecure:
        raise InputError(
            f"--host {host}: other machines could send requests without a key, and a single request can stop Triton",
            hint="type --gateway --listen ADDRESS --keys FILE --tls-cert FILE in place of --host, or add --insecure if "
            "the network admits only trusted clients",
        )
