"""Translate the errors of Triton's clients into the errors of this package.

    gRPC status                             HTTP status       error
    UNAVAILABLE, RESOURCE_EXHAUSTED         503, 429          OverloadError: a server or gateway that answers
    RESOURCE_EXHAUSTED with "large"         413               RequestRejectedError: the request is too large
    INVALID_ARGUMENT                        400, 411, 415     RequestRejectedError
    UNAUTHENTICATED, PERMISSION_DENIED      401, 403          KeyRefusedError
    UNIMPLEMENTED, NOT_FOUND                404, 405          NotOfferedError; ServerError for an unknown model
    CANCELLED                                                 ServerError: a gateway stopped reading the request
    UNAVAILABLE from the client itself      no status         ServerError: no server answers

gRPC reports the server's refusals and the client's own failures to connect with the same status, UNAVAILABLE. Only the
text distinguishes them: the texts of gRPC's own failures are listed here, every other text is the server's.
"""

from __future__ import annotations

import re
import ssl
from typing import Any, NamedTuple

from gmmvit_deploy.errors import (
    KeyRefusedError,
    NotOfferedError,
    OverloadError,
    RequestRejectedError,
    ServerError,
)
from gmmvit_deploy.runtimes.programs.access import Access, parse_url

_LOCAL = re.compile(
    r"failed to connect|connection (refused|reset|timed out|aborted)|socket closed|broken pipe|recvmsg|sendmsg"
    r"|tcp_(read|write)|dns |name resolution|name or service|domain name|c-ares|address list|goaway|stream removed"
    r"|(end of (tcp|file))|(endpoint|transport|channel|subchannel)\b.*clos|handshak|keepalive|ping timeout|unreachable"
    r"|no route to host|too many pings|peer name|hostname verification|fd shutdown",
    re.IGNORECASE,
)
"""Texts with which gRPC's client reports that it has no connection, or lost the connection."""
_UNTRUSTED = re.compile(r"certificate.?verify.?failed|peer name|hostname verification|not in peer certificate", re.I)
_EXPIRED = re.compile(r"certificate.?(has.?)?expired", re.I)
_NO_TLS = re.compile(r"wrong.version.number|record layer failure|unknown.protocol|packet length too long", re.I)
_HTTP1 = re.compile(r"frame type 80\b|http1\.x server", re.I)  # 80: the P of an answer that begins with HTTP/1
_UNKNOWN_MODEL = re.compile(r"unknown model|has no available versions")
_RESTRICTED = re.compile(r"(protocol|API) is restricted")
"""Triton's answer for an interface behind a secret: UNAVAILABLE, or HTTP's 403."""
_HTTP_BEHIND_GRPC = re.compile(r"received http2 header with status: (\d{3})", re.IGNORECASE)
_WHAT = {
    "infer": "inference",
    "get_model_config": "the configuration",
    "get_inference_statistics": "the statistics",
    "get_server_metadata": "the version",
}
_MAX_REASON = 160


class Request(NamedTuple):
    """A request, for messages.  model: a model, or ``the server``.  method: the name of the client's function."""

    url: str
    model: str
    method: str
    timeout_s: float
    access: Access


def error_from_refusal(exc: Any, request: Request) -> ServerError:
    """Translate an ``InferenceServerException``."""
    status, reason = _status(exc), _reason(exc)
    url, model = request.url, request.model
    if status == "UNAVAILABLE" and _LOCAL.search(reason):
        return _unreachable(reason, request)
    if status == "DEADLINE_EXCEEDED" or (exc.status() is None and "timed out" in reason.lower()):
        return ServerError(
            f"{model} at {url}: no answer within {request.timeout_s:g} s",
            hint="send fewer images in a request, or repeat the request when the server is less busy",
        )
    if _UNKNOWN_MODEL.search(reason):
        return ServerError(
            f"the server at {url} has no model {model!r}",
            hint="type --served-name with the name of a model of this server, or type gmmvit serve BUNDLE",
        )
    if _RESTRICTED.search(reason):
        status = "NOT_FOUND"
    if status == "RESOURCE_EXHAUSTED":  # gRPC uses this status both for a message that is too large and for overload
        status = "413" if "large" in reason.lower() else "503"
    refused = _refused(status, reason, request)
    hint = "the log of the server states the cause; gmmvit serve prints it, or appends it to the file of --log"
    return refused or ServerError(f"{model} at {url}: {reason} ({exc.status()})", hint=hint)


def error_from_transport(exc: Exception, request: Request) -> ServerError:
    """Translate an error of a socket, of TLS, or of the parser of HTTP."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        return _untrusted(exc.verify_message or str(exc), request)
    if request.method == "infer" and isinstance(exc, (ssl.SSLEOFError, ConnectionResetError, BrokenPipeError)):
        return ServerError(
            f"the server at {request.url} closed the connection during the request: {_short(str(exc))}; it stopped, or "
            "a gateway refused a request that is too large",
            hint="send fewer or smaller images in a request, or repeat the request",
        )
    return _unreachable(str(exc) or type(exc).__name__, request)


def _status(exc: Any) -> str:
    """Return gRPC's name of the status, or the number of HTTP's status, which an answer without gRPC's has as text."""
    behind = _HTTP_BEHIND_GRPC.search(str(exc.message()))
    return behind[1] if behind else str(exc.status()).removeprefix("StatusCode.")


def _reason(exc: Any) -> str:
    """Return the reason in a line; of a page in HTML, only its text."""
    message, body = str(exc.message()), exc.debug_details()
    if message.startswith("an exception occurred in the client") and isinstance(body, str):
        message = re.sub(r"<[^>]*>", " ", body)
    return " ".join(message.split()) or "no reason given"


def _short(text: str) -> str:
    return " ".join(text.split())[:_MAX_REASON]


def _refused(status: str, reason: str, request: Request) -> ServerError | None:
    """Translate the refusal of a server or gateway with this status; None for a status without a translation."""
    url, model, short = request.url, request.model, _short(reason)
    if status in ("UNAVAILABLE", "503", "429"):
        return OverloadError(
            f"the server at {url} answers, but refuses requests for now, because it is overloaded, "
            f"starting or stopping: {short}"
        )
    if status == "413":
        return RequestRejectedError(
            f"{model} at {url} rejected the request, because it is too large: {short}",
            hint="send fewer or smaller images in a request",
        )
    if status in ("INVALID_ARGUMENT", "400", "411", "415"):
        reason = re.sub(r"^in ensemble '[^']*', ", "", reason)
        return RequestRejectedError(f"{model} at {url} rejected the request: {reason}")
    if status in ("UNAUTHENTICATED", "PERMISSION_DENIED", "401", "403"):
        if not request.access.key:
            return KeyRefusedError(f"the server at {url} requires a key: {short}")
        return KeyRefusedError(
            f"the server at {url} refuses the key of {request.access.key_path}: {short}",
            hint="type --key-file FILE with a key of this server; the server's operator knows its keys",
        )
    if status in ("UNIMPLEMENTED", "NOT_FOUND", "404", "405"):
        what = _WHAT.get(request.method, request.method)
        hint = _of_port_for_images(url) if "/classify" in reason else ""  # as `serving.front` answers other paths
        return NotOfferedError(f"the server at {url} does not offer {what} of {model}: {short}", hint=hint)
    if status == "CANCELLED":
        # This package's clients cancel nothing: a gateway reset the stream, as HAProxy does before the end of a body.
        return ServerError(
            f"the gateway at {url} ended the request before it had read all of it, and gave no reason; the "
            "request may be too large, or the server overloaded",
            hint="send fewer or smaller images in a request",
        )
    if status in ("502", "504"):
        return ServerError(
            f"the gateway at {url} got no answer from its server: {short}",
            hint="repeat the request later; if the error stays, ask the server's operator",
        )
    return None


def _unreachable(detail: str, request: Request) -> ServerError:
    detail = detail.rpartition("OPENSSL_internal:")[2]  # gRPC writes numbers of errors and names of layers before it
    if _UNTRUSTED.search(detail):
        return _untrusted(detail, request)
    if other_port := _other_port(request.url):
        return ServerError(
            f"no Triton server answers at {request.url}: {_short(detail)}",
            hint=f"type {other_port}, because {_PORT_OF[parse_url(request.url).protocol]}; if the server has other "
            "ports, gmmvit serve printed its addresses at its start",
        )
    if _HTTP1.search(detail):
        return ServerError(
            f"the program that answers at {request.url} does not speak gRPC: {_short(detail)}",
            hint=_of_port_for_images(request.url),
        )
    if _NO_TLS.search(detail):
        return ServerError(
            f"the program that answers at {request.url} does not use TLS: {_short(detail)}",
            hint="type http:// in place of https://, or grpc:// in place of grpcs://; or the address of the gateway",
        )
    tls = parse_url(request.url).tls
    other = "does not use TLS, type http:// or grpc://" if tls else "uses TLS, type https:// or grpcs://"
    return ServerError(
        f"no Triton server answers at {request.url}: {_short(detail)}",
        hint="type --bundle BUNDLE to compute without a server, or gmmvit serve BUNDLE to start one, or --url and the "
        f"address of a running server; if the server {other}",
    )


def _of_port_for_images(url: str) -> str:
    address = f"http://{parse_url(url).address}"
    return (
        "type --url with an address of gRPC or HTTP that gmmvit serve printed at its start; if this is its port for "
        f"images, type curl --data-binary @photo.jpg {address}/classify"
    )


_PORTS = {"http": "8000", "grpc": "8001"}
_PORT_OF = {
    "http": "port 8001 is the usual port of gRPC, and 8000 that of HTTP",
    "grpc": "port 8000 is the usual port of HTTP, and 8001 that of gRPC",
}


def _other_port(url: str) -> str:
    """Return the address with the port of its protocol if ``url`` has Triton's port of the other protocol."""
    protocol, address, tls = parse_url(url)
    host, _, port = address.rpartition(":")
    is_other = port in _PORTS.values() and port != _PORTS[protocol]
    return f"{protocol}{'s' if tls else ''}://{host}:{_PORTS[protocol]}" if is_other else ""


def _untrusted(detail: str, request: Request) -> ServerError:
    if _EXPIRED.search(detail):
        return ServerError(
            f"the certificate of {request.url} has expired: {_short(detail)}",
            hint="ask the operator of the service for a new certificate; if today's date is wrong here, correct it",
        )
    return ServerError(
        f"the certificate of {request.url} is not trusted: {_short(detail)}",
        hint="type --ca FILE with the certificate authority of the server, or with its self-signed certificate; the "
        "certificate must name the host of the address",
    )
