"""The rules that the frontends for HTTP and gRPC share, as lines of HAProxy's configuration."""

from __future__ import annotations

from gmmvit_deploy.serving.gateway.options import CLIENT_HEADER, FRONT_HEADER, GatewayOptions

__all__ = [
    "BODY_TIME_S",
    "CLIENT",
    "COMPRESSED",
    "LARGE_LENGTH",
    "NO_KEY",
    "OWN_ERRORS",
    "UNKNOWN",
    "UNKNOWN_PATH",
    "arrival",
    "bind_line",
    "overload_rules",
    "queue_conditions",
    "refuse",
    "refusing",
    "serving",
    "waiting_bytes",
]

UNKNOWN = "!{ var(txn.client) -m found }"
BODY_TIME_S = 10
"""The maximum time to receive the headers, and again to receive a body that fits into a buffer."""
REFUSED_TIME_S = 5
"""The maximum time to receive the body of a refused request, as far as the body fits into a buffer."""
_MOST_REFUSED = {UNKNOWN: 500, "": 1000}
"""Condition → number of refused requests, whose bodies are read; further requests are answered at once."""
CLIENT = "http_auth_bearer,sha2(256),hex,map({keys})"
"""Expression for the name of the client; it has no value for an unknown key."""
NO_KEY = "Authorization: Bearer KEY is missing, or the key is unknown"
UNKNOWN_PATH = "no such path, model or method"
COMPRESSED = "compressed requests are refused"
OVERLOADED = "the server is overloaded; retry later"
OWN_ERRORS = {
    400: (3, "invalid request"),
    408: (14, "the request did not arrive in time"),
    500: (13, "the gateway failed"),
    502: (14, "the server closed the connection"),
    503: (8, OVERLOADED),
    504: (4, "the server did not answer in time"),
}
"""The answers of HAProxy itself: HTTP status → (status of gRPC, message)."""
LARGE_LENGTH = "Content-Length is too large"
_KEPT = "!{ var(txn.refused) -m found }"
_MOST_PATH_BYTES = 1024
"""The part of a path that the access log keeps: HAProxy would cut a longer line, and the rest would be no JSON."""
_LOG = (
    '{"time":"%[date,utime(%Y-%m-%dT%H:%M:%SZ)]","protocol":"%[var(txn.protocol)]","client":"%[var(txn.client)]",'
    '"address":"%ci","method":"%HM","path":"%[var(txn.path),json(utf8s)]","model":"%[var(txn.model)]",'
    '"bundle":"%[var(txn.bundle)]","server":"%s","status":%ST,"grpc_status":"%[var(txn.grpc_status)]",'
    '"refused":"%[var(txn.refused)]","bytes_in":%U,"bytes_out":%B,"queue_ms":%Tw,"network_ms":%Tr,'
    '"network_us":%[var(txn.network_us)],"total_ms":%Ta,"end":"%ts"}'
)

_ERROR_LOG = (
    '{"time":"%[date,utime(%Y-%m-%dT%H:%M:%SZ)]","protocol":"PROTOCOL","client":"-","address":"%ci","status":%ST,'
    '"refused":"%[fc_err_str,regsub(^Success$,malformed_request)]","end":"%ts"}'
)
"""A line for a connection whose first request is malformed, or that ends before it, as after a failed TLS handshake."""


def bind_line(address: str, options: GatewayOptions, *, alpn: str, plain: str = "") -> str:
    tls = f"ssl crt {options.files.tls} alpn {alpn}" if options.files.tls else plain
    return f"bind {address} {tls}".rstrip()


def refuse(status: int, message: str, condition: str) -> str:
    """Return the rule that refuses a request which is not yet refused, if the condition holds."""
    return f'http-request set-var-fmt(txn.refused) "{status} {message}" if {_KEPT} {condition}'


def arrival(protocol: str, options: GatewayOptions) -> list[str]:
    """Return the rules that identify the client, and remove the headers that only the gateway may set."""
    private = [CLIENT_HEADER, FRONT_HEADER, *([options.admin[0]] if options.admin else [])]
    return [
        f"log {options.access_log} len 8192 format raw local0",
        f"log-format '{_LOG}'",
        f"http-request set-var(txn.protocol) str({protocol})",
        "http-request set-var(txn.network_us) int(-1)",  # no time
        f"error-log-format '{_ERROR_LOG.replace('PROTOCOL', protocol)}'",
        f"http-request set-var(txn.path) path,bytes(0,{_MOST_PATH_BYTES})",
        f"http-request set-var(txn.client) {CLIENT.format(keys=options.files.keys)}",
        *(f"http-request del-header {header}" for header in private),
        "http-request del-header authorization",
        f"http-request set-header {CLIENT_HEADER} %[var(txn.client)]",
    ]


def refusing(name: str, errors: list[str]) -> list[str]:
    """Return the backend that answers refused requests, with a bound on memory and time for strangers.

    A request that is denied here does not wait for its body; after an answer of Lua, HAProxy waits for up to 60 s.
    """
    return [
        f"backend {name}",
        f"timeout server {REFUSED_TIME_S}s",
        *(
            f"http-request deny deny_status 503 if {{ be_conn({name}) gt {most} }} {clients}".rstrip()
            for clients, most in _MOST_REFUSED.items()
        ),
        f"http-request wait-for-body time {REFUSED_TIME_S}s",
        "http-request use-service lua.gmmvit_refuse",
        *errors,
    ]


def queue_conditions(options: GatewayOptions, backend: str) -> list[str]:
    """Return conditions: ``full``, the queues together hold ``queue_limit`` requests, and ``busy``."""
    return [
        "http-request set-var(txn.waiting) queue(triton_grpc)",
        *(["http-request set-var(txn.waiting) queue(front),add(txn.waiting)"] if options.front else []),
        f"acl full queue(triton_http),add(txn.waiting) ge {max(options.queue_limit, 1)}",
        f"acl busy be_conn({backend}) ge {options.in_flight * serving(options)}",
    ]


def serving(options: GatewayOptions) -> int:
    """Return the number of servers that get requests, at least 1."""
    return max(1, sum(upstream.weight > 0 for upstream in options.upstreams))


def overload_rules(options: GatewayOptions, status: int, large: str, work: str, busy: str = "busy") -> list[str]:
    """Return the rules that refuse a request because of the queue.

    large: the condition that the body does not fit into a buffer.  work: the condition that the request is for Triton.
    busy: the condition that a further request would wait.
    """
    when_full = busy if options.queue_limit == 0 else f"{busy} full"
    return [refuse(status, OVERLOADED, f"{work} {when_full}"), refuse(status, OVERLOADED, f"{work} {busy} {large}")]


def waiting_bytes(options: GatewayOptions) -> int:
    """Return the size of the largest body that fits into a buffer together with the headers."""
    return options.buffer_bytes - 16 * 1024
