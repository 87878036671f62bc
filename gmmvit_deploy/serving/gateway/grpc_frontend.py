"""The frontend for gRPC: it reads the length and the name of the model from the first bytes of a message."""

from __future__ import annotations

from gmmvit_deploy.serving.gateway.options import BUNDLE_HEADER, GatewayOptions
from gmmvit_deploy.serving.gateway.rules import (
    BODY_TIME_S,
    COMPRESSED,
    NO_KEY,
    OWN_ERRORS,
    UNKNOWN,
    arrival,
    bind_line,
    overload_rules,
    queue_conditions,
    refuse,
    waiting_bytes,
)

__all__ = ["GRPC_METHODS", "grpc_errors", "grpc_frontend"]

GRPC_METHODS = (
    "ModelConfig",
    "ModelInfer",
    "ModelMetadata",
    "ModelReady",
    "ModelStatistics",
    "ServerLive",
    "ServerMetadata",
    "ServerReady",
)
"""The methods of Triton's gRPC service that clients may call."""
_NO_SERVER = "{ status 503 } { nbsrv(triton_grpc) eq 0 }"


def grpc_frontend(options: GatewayOptions) -> list[str]:
    service = "/inference.GRPCInferenceService/"
    allowed = " ".join(f"{service}{method}" for method in GRPC_METHODS)
    large = f"{{ var(txn.length) -m int gt {waiting_bytes(options)} }}"
    lines = [
        "frontend grpc",
        bind_line(options.grpc_bind, options, alpn="h2", plain="proto h2"),
        *arrival("grpc", options),
        f"acl infer path {service}ModelInfer",
        f"acl statistics path {service}ModelStatistics",
        f"acl allowed path {allowed} /grpc.health.v1.Health/Check",
        "acl refused var(txn.refused) -m found",
        refuse(16, NO_KEY, UNKNOWN),
        refuse(12, "no such method", "!allowed"),
        refuse(12, "no such method", "!{ method POST }"),
        refuse(12, COMPRESSED, "{ req.hdr(grpc-encoding) -m found } !{ req.hdr(grpc-encoding) identity }"),
        f"http-request wait-for-body time {BODY_TIME_S}s at-least 128 if !refused",
        # A message follows its compressed flag (1 byte) and its length (4 bytes, big-endian).
        "http-request set-var(txn.length) req.body,bytes(1,4),be2dec(,4) if !refused",
        # The first field of ModelInferRequest is the name; a tag of a later field follows: version, id or inputs.
        "http-request set-var(txn.model) req.body,bytes(7,64),field(1,\\x12\\x1a*) if infer !refused",
        f"http-request unset-var(txn.model) if !{{ var(txn.model) -m str {' '.join(options.models)} }}",
        refuse(12, COMPRESSED, "{ req.body,bytes(0,1),hex 01 }"),
        refuse(
            8,
            f"the message is too large; the limit is {options.max_body_bytes} bytes",
            f"{{ var(txn.length) -m int gt {options.max_body_bytes} }}",
        ),
        f"http-request wait-for-body time {BODY_TIME_S}s if !refused",
        # At the end: between this look at the queue and the queue itself, HAProxy does not wait for anything.
        *queue_conditions(options, "triton_grpc"),
        *overload_rules(options, 8, large, "allowed"),
    ]
    if options.admin is not None:
        header, secret = options.admin
        lines.append(f"http-request set-header triton-grpc-protocol-{header} {secret} if statistics")
    return [
        *lines,
        "use_backend refusing_grpc if refused",
        "default_backend triton_grpc",
        f"http-response set-var(txn.bundle) res.hdr({BUNDLE_HEADER})",
        "http-after-response set-header content-type application/grpc if { status 400:599 }",
        f"http-after-response set-header grpc-status 14 if {_NO_SERVER}",
        f'http-after-response set-header grpc-message "no server is ready" if {_NO_SERVER}',
        "http-after-response set-status 200 if { status 400:599 }",
        # Triton answers INTERNAL to bytes that are no message, which is a mistake of the client.
        "http-after-response set-header grpc-status 3 if { res.hdr(grpc-message) -m beg 'Unable to parse' }",
        "http-after-response set-var(txn.grpc_status) res.hdr(grpc-status)",
        *grpc_errors(),
    ]


def grpc_errors() -> list[str]:
    """Return the answers of HAProxy itself, as statuses of gRPC."""
    return [
        f'http-error status {status} hdr grpc-status {code} hdr grpc-message "{message}"'
        for status, (code, message) in OWN_ERRORS.items()
    ]
