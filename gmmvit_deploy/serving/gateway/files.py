"""Write the folder from which HAProxy runs: configuration, hashes of the keys, Lua program, certificate."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.extras import require
from gmmvit_deploy.serving.gateway.config import bundles_text, config_text
from gmmvit_deploy.serving.gateway.handover import buffer_bytes
from gmmvit_deploy.serving.gateway.keys import map_text
from gmmvit_deploy.serving.gateway.options import (
    DEFAULT_IN_FLIGHT,
    DEFAULT_QUEUE_TIMEOUT_MS,
    Front,
    GatewayFiles,
    GatewayOptions,
    GatewaySettings,
    Upstream,
)
from gmmvit_deploy.serving.served_models import ServedModels, read_tuning

__all__ = ["ALERTS", "CONFIG_FILE", "gateway_options", "queue_bounds", "tls_pem", "write_files"]

CONFIG_FILE = "haproxy.cfg"
_TLS_FILE = "tls.pem"
_HERE = Path(__file__).parent
ALERTS = _HERE / "alerts.yml"
"""Alert rules for Prometheus over the metrics of ``gmmvit serve``."""


def queue_bounds(settings: GatewaySettings, repository: Path) -> tuple[int, int]:
    """Return (requests in flight, timeout of the queue in ms): of the user, else of ``gmmvit tune``, else the defaults.

    Errors: InputError when the file of ``gmmvit tune`` in the repository is invalid.
    """
    tuned = read_tuning(repository)
    in_flight, timeout = settings.in_flight, settings.queue_timeout_ms
    if in_flight is None:
        in_flight = tuned.in_flight if tuned else DEFAULT_IN_FLIGHT
    if timeout is None:
        timeout = max(1, round(tuned.bound_ms)) if tuned else DEFAULT_QUEUE_TIMEOUT_MS
    return in_flight, timeout


def gateway_options(
    settings: GatewaySettings,
    models: ServedModels,
    repository: Path,
    *,
    binds: Mapping[str, str],
    upstreams: tuple[Upstream, ...],
    files: GatewayFiles,
    front: Front | None = None,
) -> GatewayOptions:
    """Combine what the user chose with what the repository states.

    binds: ``HTTP``, ``gRPC`` and ``metrics`` → the address to listen on.
    Errors: InputError when the file of ``gmmvit tune`` in the repository is invalid.
    """
    in_flight, timeout = queue_bounds(settings, repository)
    return GatewayOptions(
        http_bind=binds["HTTP"],
        grpc_bind=binds["gRPC"],
        metrics_bind=binds["metrics"],
        upstreams=upstreams,
        models=models.names,
        health=models.health,
        files=replace(files, tls=_TLS_FILE if settings.tls_cert else ""),
        buffer_bytes=buffer_bytes(models),
        max_body_bytes=settings.max_body_bytes,
        json_bytes=settings.json_bytes,
        in_flight=in_flight,
        queue_limit=settings.queue_limit,
        queue_timeout_ms=timeout,
        front=front,
    )


def tls_pem(settings: GatewaySettings) -> str:
    """Return certificate, chain and private key as a single PEM text; "" without TLS.

    Errors: InputError when a file cannot be read, the certificate has expired, or the key does not belong to it.
    """
    if settings.tls_cert is None:
        return ""
    paths = [settings.tls_cert, *([settings.tls_key] if settings.tls_key else [])]
    texts = []
    for path in paths:
        try:
            texts.append(path.read_text(encoding="ascii"))
        except (OSError, UnicodeDecodeError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else "the file is not PEM text"
            raise InputError(f"{path}: the file for TLS cannot be read: {reason}", hint=_TLS_HINT) from exc
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(paths[0], paths[-1], password="")
    except (ssl.SSLError, OSError, ValueError) as exc:
        named = " and ".join(str(path) for path in paths)
        raise InputError(
            f"{named}: expected a certificate and its private key without a password, both in PEM form: {exc}",
            hint=_TLS_HINT,
        ) from exc
    _require_not_expired(paths[0], texts[0])
    # An empty line ends a command to HAProxy, so the text must have none.
    return "".join(f"{line}\n" for text in texts for line in text.splitlines() if line.strip())


def _require_not_expired(path: Path, pem: str) -> None:
    """Refuse a file whose first certificate, which the gateway would send to clients, has expired.

    Errors: InputError that names the file and the time.
    """
    x509 = require("cryptography.x509", package="cryptography", extra="serve")
    try:
        expiry = x509.load_pem_x509_certificate(pem.encode("ascii")).not_valid_after_utc
    except ValueError as exc:
        raise InputError(f"{path}: the certificate cannot be read: {exc}", hint=_TLS_HINT) from exc
    if expiry <= datetime.now(timezone.utc):
        raise InputError(
            f"{path}: the certificate expired on {expiry:%Y-%m-%d} at {expiry:%H:%M} UTC, so clients would refuse it",
            hint=f"replace {path} by a new certificate; openssl x509 -noout -enddate -in {path} prints the date",
        )


_TLS_HINT = "type --tls-cert CHAIN.pem --tls-key KEY.pem, or --tls-cert with a file that contains both"


def write_files(folder: Path, options: GatewayOptions, keys: Mapping[str, str], pem: str) -> Path:
    """Write all files into ``folder``, readable by the owner only, and return the path of the configuration."""
    texts = {
        CONFIG_FILE: config_text(options),
        options.files.keys: map_text(keys),
        options.files.bundles: bundles_text(options.upstreams),
        options.files.refuse: (_HERE / "refuse.lua").read_text(encoding="utf-8"),
        **({options.files.tls: pem} if pem else {}),
    }
    for name, text in texts.items():
        with os.fdopen(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
    return folder / CONFIG_FILE
