"""Join the metrics of all parts of the service, in Prometheus' text format."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path

from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.serving.gateway.haproxy import HAProxy
from gmmvit_deploy.serving.metric_text import metric_text

__all__ = ["certificate_metric", "joined_metrics", "text_from_socket"]

_TIMEOUT_S = 5.0


def text_from_socket(path: Path, target: str) -> str:
    """Return the body of the answer to ``GET target`` on a Unix socket.  Errors: OSError, HTTPException."""
    connection = http.client.HTTPConnection("localhost", timeout=_TIMEOUT_S)
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.sock.settimeout(_TIMEOUT_S)
    try:
        connection.sock.connect(str(path))
        connection.request("GET", target)
        return connection.getresponse().read().decode(errors="replace")
    finally:
        connection.close()


def certificate_metric(haproxy: HAProxy) -> str:
    """Return the time at which the certificate of a running HAProxy expires; "" without TLS or without an answer."""
    try:
        answer = haproxy.command("show ssl cert tls.pem")
    except ServerError:
        return ""
    match = re.search(r"^not ?after: (.+)$", answer, re.MULTILINE | re.IGNORECASE)
    if match is None:
        return ""
    expiry = ssl.cert_time_to_seconds(match[1].strip())
    meaning = "Unix time at which the certificate of the gateway expires"
    return metric_text("gmmvit_gateway_certificate_expiry_seconds", "gauge", meaning, [("", expiry)])


def joined_metrics(sources: Mapping[str, Callable[[], str]]) -> str:
    """Return the metrics of all sources that answer; ``gmmvit_metrics_source_up`` states which sources answered.

    sources: name of the source → function that returns its metrics, or raises OSError or HTTPException.
    """
    parts, states = [], []
    for name, source in sources.items():
        try:
            parts.append(source().rstrip("\n"))
            states.append((name, 1))
        except (OSError, http.client.HTTPException):
            states.append((name, 0))
    own = [
        "# HELP gmmvit_metrics_source_up 1 if this part of the service answered with its metrics.",
        "# TYPE gmmvit_metrics_source_up gauge",
        *(f'gmmvit_metrics_source_up{{source="{name}"}} {state}' for name, state in states),
    ]
    return "\n".join([*parts, *own, ""])
