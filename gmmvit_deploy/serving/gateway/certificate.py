"""When the certificate of a running HAProxy expires."""

from __future__ import annotations

import re
import ssl

from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.serving.gateway.haproxy import HAProxy
from gmmvit_deploy.serving.metric_text import metric_text

__all__ = ["certificate_metric"]


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
