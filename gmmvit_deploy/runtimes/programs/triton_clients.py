"""Open a client of the package tritonclient: gRPC or HTTP, with or without TLS."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gmmvit_deploy.extras import require
from gmmvit_deploy.runtimes.programs.access import Access
from gmmvit_deploy.runtimes.programs.server_url import ServerUrl

__all__ = ["last_retry_after", "open_client"]


def open_client(url: ServerUrl, access: Access, *, timeout_s: float) -> Any:
    """Return an ``InferenceServerClient``, which connects with its first request.

    timeout_s: for HTTP, the time limit of each step of a request; gRPC's clients take the limit with each request.
    """
    module = require(f"tritonclient.{url.protocol}", package="tritonclient", extra="client")
    if url.protocol == "grpc":
        roots = str(access.ca_path) if access.ca_path and url.tls else None
        return module.InferenceServerClient(
            url.address, ssl=url.tls, root_certificates=roots, channel_args=_channel_arguments(url)
        )
    times = {"connection_timeout": timeout_s, "network_timeout": timeout_s}
    trusted = {"ca_certs": str(access.ca_path)} if access.ca_path else {}
    client = module.InferenceServerClient(url.address, ssl=url.tls, ssl_options=trusted if url.tls else None, **times)
    _keep_retry_after(client)
    return client


def last_retry_after(client: Any) -> str | None:
    """Return the header Retry-After of the last answer to a client over HTTP; None without this header."""
    return getattr(client, "retry_after", None)


def _channel_arguments(url: ServerUrl) -> list[tuple[str, int]]:
    """Return gRPC settings: messages may have any size, and requests to this machine bypass the proxy."""
    sizes = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    return [*sizes, ("grpc.enable_http_proxy", 0)] if url.is_loopback else sizes


def _keep_retry_after(client: Any) -> None:
    """Keep the header Retry-After of each answer in the client.  Triton's client drops the headers of an error."""

    def answered(send: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        client.retry_after = None
        answer = send(*arguments, **options)
        client.retry_after = answer.get("retry-after")
        return answer

    for name in ("_get", "_post"):
        setattr(client, name, partial(answered, getattr(client, name)))
