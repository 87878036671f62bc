"""Write the configuration of HAProxy 2.6 or newer, as text; nothing is read and nothing is started.

    clients ──> frontend http ──> backend triton_http ──> Triton, HTTP
                              ──> backend front       ──> the front of the server, POST /classify
            ──> frontend grpc ──> backend triton_grpc ──> Triton, gRPC
            ──> frontend metrics

A frontend refuses a request for the first of these reasons: path, key, encoding, length, JSON tensors, full queue.
``refuse.lua`` answers after it has read the body, of strangers at most 1 MiB. A request that is not refused waits in
its backend until Triton works on fewer than ``in_flight`` requests, at most for ``queue_timeout_ms``; HAProxy itself
then answers 503.

Only a request whose whole body fits into a buffer may wait, and images over HTTP/1: HAProxy 2.6 cannot end an HTTP/2
stream properly before it has read the body, and a gRPC client would report CANCELLED instead of the refusal. A larger
request is refused at once while Triton works on ``in_flight`` requests.
"""

from __future__ import annotations

import re

from gmmvit_deploy.serving.gateway.grpc_frontend import grpc_errors, grpc_frontend
from gmmvit_deploy.serving.gateway.options import BUNDLE_HEADER, FRONT_HEADER, NOWHERE, GatewayOptions, Upstream
from gmmvit_deploy.serving.gateway.rules import (
    BODY_TIME_S,
    CLIENT,
    COMPRESSED,
    LARGE_LENGTH,
    NO_KEY,
    OWN_ERRORS,
    UNKNOWN,
    UNKNOWN_PATH,
    arrival,
    bind_line,
    overload_rules,
    queue_conditions,
    refuse,
    refusing,
    serving,
    waiting_bytes,
)

__all__ = ["EXPORTER_PATH", "MOST_JSON_HEADER_BYTES", "bundles_text", "config_text"]

MOST_JSON_HEADER_BYTES = 4096
"""The maximum size of the JSON in front of binary tensors.  The JSON of a classifier's request has about 300 bytes."""
EXPORTER_PATH = "/metrics?scope=frontend&scope=backend&scope=server"
_HEALTH_INTERVAL_S = 1
_MOST_CONNECTIONS = 2000
_MOST_STREAMS = 100
"""The maximum number of requests on a connection of HTTP/2.  With fewer, a client that sends three times the capacity
on a single connection waits for itself, and never gets the refusals of the gateway."""


def config_text(options: GatewayOptions) -> str:
    """Return the configuration.  ``haproxy -c -f FILE`` checks it."""
    sections = [
        _global(options),
        _defaults(options),
        _http(options),
        grpc_frontend(options),
        _metrics(options),
        _triton_http(options),
        _triton_grpc(options),
        *_metrics_backends(options),
        refusing("refusing_http", _http_errors()),
        refusing("refusing_grpc", grpc_errors()),
    ]
    if options.front is not None:
        sections.append(_front(options))
    if options.files.exporter:
        sections.append(_exporter(options.files.exporter))
    text = "\n\n".join("\n    ".join(section) for section in sections)
    return f"# Written by gmmvit: the gateway in front of a Triton server.\n{text}\n"


def _global(options: GatewayOptions) -> list[str]:
    lines = [
        "global",
        "default-path config",
        "fd-hard-limit 8192",
        f"maxconn {_MOST_CONNECTIONS}",
        f"tune.h2.max-concurrent-streams {_MOST_STREAMS}",
        "hard-stop-after 30s",
        f"tune.bufsize {options.buffer_bytes}",
        "ssl-default-bind-options ssl-min-ver TLSv1.2 no-tls-tickets",
        # lua-load-per-thread finds a relative path for the first thread only: HAProxy does not start with more threads.
        f"lua-load {options.files.refuse}",
    ]
    if options.threads:
        lines.append(f"nbthread {options.threads}")
    if options.files.socket:
        lines.append(f'stats socket "{options.files.socket}" mode 600 level admin')
    return lines


def _defaults(options: GatewayOptions) -> list[str]:
    return [
        "defaults",
        "mode http",
        "option dontlognull",
        "option redispatch",
        "retries 1",
        "retry-on conn-failure",
        # With places for rollouts, another HAProxy may take over: kept connections end with an answer, not between two.
        *(["option idle-close-on-response"] if len(options.upstreams) > 1 else []),
        "timeout connect 2s",
        f"timeout http-request {BODY_TIME_S}s",
        "timeout http-keep-alive 60s",
        "timeout client 60s",
        "timeout server 60s",
        "timeout check 5s",
        f"timeout queue {options.queue_timeout_ms}ms",
    ]


def _http(options: GatewayOptions) -> list[str]:
    models = "|".join(re.escape(model) for model in options.models)
    version = "(/versions/[0-9]+)?"
    front = options.front is not None
    large = f"infer {{ req.hdr_val(content-length) gt {waiting_bytes(options)} }}"
    model = options.front.model if options.front is not None else ""
    classified = [f"http-request set-var(txn.model) str({model}) if {{ path /classify }}"] if front else []
    lines = [
        "frontend http",
        bind_line(options.http_bind, options, alpn="h2,http/1.1"),
        *arrival("http", options),
        "http-request set-var(txn.model) path,field(4,/)",
        *classified,
        f"http-request unset-var(txn.model) if !{{ var(txn.model) -m str {' '.join(options.models)} }}",
        "acl get method GET",
        "acl post method POST",
        f"acl infer path_reg '^/v2/models/({models}){version}/infer$'",
        f"acl read path_reg '^/v2(/models/({models}){version}(/ready|/config|/stats)?)?$'",
        "acl statistics path_end /stats",
        "acl classify path /classify",
        "acl refused var(txn.refused) -m found",
        *_malformed(),
        "http-request return status 200 if get !refused { path /v2/health/live }",
        "http-request return status 200 if get !refused { path /v2/health/ready } { nbsrv(triton_http) gt 0 }",
        "http-request return status 503 hdr retry-after 1 if get !refused { path /v2/health/ready }",
        "http-request set-var(txn.has_body) bool(true) if post infer",
        *(["http-request set-var(txn.has_body) bool(true) if post classify"] if front else []),
        "acl body_rules var(txn.has_body) -m bool",
        refuse(401, NO_KEY, UNKNOWN),
        refuse(404, UNKNOWN_PATH, "!body_rules !{ method GET }"),
        refuse(404, UNKNOWN_PATH, "!body_rules !read"),
        refuse(415, COMPRESSED, "{ req.hdr(content-encoding) -m found }"),
        refuse(411, "send Content-Length; chunked requests are refused", "{ req.hdr(transfer-encoding) -m found }"),
        refuse(411, "send Content-Length", "body_rules !{ req.hdr(content-length) -m found }"),
        refuse(
            413,
            f"the request is too large; the limit is {options.max_body_bytes} bytes",
            f"{{ req.hdr_val(content-length) gt {options.max_body_bytes} }}",
        ),
        *_json_rules(options),
        f"http-request wait-for-body time {BODY_TIME_S}s if body_rules !refused",
        # At the end: between this look at the queue and the queue itself, HAProxy does not wait for anything.
        *queue_conditions(options, "triton_http"),
        *overload_rules(options, 503, large, "infer"),
        *(_overload_of_front(options) if front else []),
    ]
    if options.admin is not None:
        lines.append(f"http-request set-header {options.admin[0]} {options.admin[1]} if statistics")
    lines.append("use_backend refusing_http if refused")
    if front:
        lines.append("use_backend front if classify")
    return [
        *lines,
        "default_backend triton_http",
        f"http-response set-var(txn.bundle) res.hdr({BUNDLE_HEADER})",
        "http-after-response set-header retry-after 1 if { status 503 }",
        *_http_errors(),
    ]


def _overload_of_front(options: GatewayOptions) -> list[str]:
    """Return the rules for images: those of any size may wait, but for a stream of HTTP/2 whose body is not there."""
    busy = f"{{ be_conn(front) ge {options.in_flight * serving(options)} }}"
    large = f"{{ req.hdr_val(content-length) gt {waiting_bytes(options)} }} {{ req.ver 2.0 }}"
    return [
        # The served bundle takes no encoded images; another one, before a rollout, did.
        refuse(404, UNKNOWN_PATH, "classify { nbsrv(front) eq 0 } { nbsrv(triton_http) gt 0 }"),
        *overload_rules(options, 503, large, "classify", busy),
    ]


def _malformed() -> list[str]:
    """Return the rules against HTTP that HAProxy 2.6 takes, and that Triton may understand differently."""
    too_long = "{ req.hdr(content-length),length gt 9 }"
    body = f'{{"error":"{LARGE_LENGTH}"}}'
    return [
        refuse(505, "expected HTTP/1.0, HTTP/1.1 or HTTP/2", "!{ req.ver 1.0 1.1 2.0 }"),
        refuse(400, "a header contains a zero byte", "{ req.hdrs -m reg '\\x00' }"),
        # HAProxy 2.6 takes a length of 2**64 for 0, and compares lengths in 32 bits.
        refuse(413, LARGE_LENGTH, too_long),
        f"http-request return status 413 content-type application/json string '{body}' if {too_long}",
    ]


def _json_rules(options: GatewayOptions) -> list[str]:
    """Return the rules for the length of the JSON; Triton takes ``+5`` for 5, HAProxy for no number."""
    length = "inference-header-content-length"
    given, number = f"{{ req.hdr_cnt({length}) gt 0 }}", f"{{ req.fhdr({length}) -m reg '^[0-9]{{1,4}}$' }}"
    expected = f"Inference-Header-Content-Length: expected up to {MOST_JSON_HEADER_BYTES} bytes of JSON, as digits"
    rules = [
        refuse(400, "Inference-Header-Content-Length was sent twice", f"infer {{ req.fhdr_cnt({length}) gt 1 }}"),
        refuse(400, expected, f"infer {given} !{number}"),
        refuse(400, expected, f"infer {{ req.hdr_val({length}) gt {MOST_JSON_HEADER_BYTES} }}"),
    ]
    if options.json_bytes == 0:
        message = "tensors in JSON are refused; send binary tensors (Inference-Header-Content-Length)"
        return [*rules, refuse(400, message, f"infer !{number}")]
    message = f"tensors in JSON are refused above {options.json_bytes} bytes; send binary tensors"
    return [*rules, refuse(400, message, f"infer !{given} {{ req.hdr_val(content-length) gt {options.json_bytes} }}")]


def _http_errors() -> list[str]:
    """Return the answers of HAProxy itself, as JSON."""
    messages = {status: message for status, (_, message) in OWN_ERRORS.items()}
    messages[503] = "the server is overloaded or not ready; retry later"  # HTTP answers 503 to both
    return [
        f'http-error status {status} content-type application/json string \'{{"error":"{message}"}}\''
        for status, message in messages.items()
    ]


def _metrics(options: GatewayOptions) -> list[str]:
    lines = [
        "frontend metrics",
        bind_line(options.metrics_bind, options, alpn="h2,http/1.1"),
        f"http-request set-var(txn.client) {CLIENT.format(keys=options.files.keys)}",
        "http-request return status 401 hdr www-authenticate Bearer if !{ var(txn.client) -m found }",
        "http-request del-header authorization",
        "http-request use-service prometheus-exporter if { method GET } { path /metrics/gateway }",
    ]
    if options.metrics_address:
        lines.append("use_backend all_metrics if { method GET } { path /metrics }")
    else:  # a service changes its servers, so /metrics alone has the metrics of the server of now
        lines.append("use_backend triton_metrics if { method GET } { path /metrics/server }")
    return [*lines, "default_backend no_metrics"]


def _servers(options: GatewayOptions, address: str, extra: str) -> list[str]:
    lines = []
    for upstream in options.upstreams:
        where = getattr(upstream, address) or NOWHERE
        line = f"server {upstream.name} {where} weight {upstream.weight} {extra.format(upstream.name)}"
        lines.append(line + (" disabled" if where == NOWHERE else ""))
    return lines


def _bundle(options: GatewayOptions) -> list[str]:
    """Return the rules that state the bundle of the server that answered, and its time with the time in the queue.

    The bundle comes from a map, because a rollout changes bundles.
    """
    value = f"srv_name,map({options.files.bundles})"
    return [
        "http-request set-var(txn.began) date(0,us)",
        "http-response set-var(txn.network_us) date(0,us),sub(txn.began)",
        f"http-response set-header {BUNDLE_HEADER} %[{value}] if {{ {value} -m found }}",
    ]


def bundles_text(upstreams: tuple[Upstream, ...]) -> str:
    """Return the text of the map: a line with the name of the server and the hash of its bundle for each server."""
    return "".join(f"{upstream.name} {upstream.bundle}\n" for upstream in upstreams if upstream.bundle)


def _triton_http(options: GatewayOptions) -> list[str]:
    health = options.health
    check = f"http-check send meth {'POST' if health.body else 'GET'} uri {health.path} ver HTTP/1.1 hdr host triton"
    check += "".join(f" hdr {name} {value}" for name, value in health.headers)
    if health.body:
        check += f" body '{health.body}'"
    return [
        "backend triton_http",
        "option httpchk",
        check,
        "http-check expect status 200",
        *_bundle(options),
        *_http_errors(),
        *_servers(options, "http", f"maxconn {options.in_flight} check inter {_HEALTH_INTERVAL_S}s fall 2 rise 1"),
    ]


def _triton_grpc(options: GatewayOptions) -> list[str]:
    return [
        "backend triton_grpc",
        *_bundle(options),
        *grpc_errors(),
        *_servers(options, "grpc", f"maxconn {options.in_flight} proto h2 track triton_http/{{}}"),
    ]


def _metrics_backends(options: GatewayOptions) -> list[list[str]]:
    nothing = ["backend no_metrics", "http-request return status 404"]
    if options.metrics_address:
        return [nothing, ["backend all_metrics", f"server metrics {options.metrics_address}"]]
    first = options.upstreams[0]
    server = f"server {first.name} {first.metrics}"
    return [nothing, ["backend triton_metrics", "http-request set-path /metrics", server]]


def _front(options: GatewayOptions) -> list[str]:
    if options.front is None:
        return []
    return [
        "backend front",
        f"http-request set-header {FRONT_HEADER} {options.front.secret}",
        *_bundle(options),
        *_http_errors(),
        *_servers(options, "front", f"maxconn {options.in_flight} track triton_http/{{}}"),
    ]


def _exporter(socket: str) -> list[str]:
    return [
        "frontend exporter",
        f'bind "unix@{socket}" mode 600',
        "http-request use-service prometheus-exporter",
    ]
