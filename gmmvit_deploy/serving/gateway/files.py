"""Write the folder from which HAProxy runs, that of ``gmmvit serve`` or the user's own.

The comments of the template ``haproxy.cfg.jinja`` say how the gateway works.
"""

from __future__ import annotations

import os
import re
import shutil
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path

from gmmvit_deploy.errors import InputError, ServerError
from gmmvit_deploy.extras import require
from gmmvit_deploy.files.writing import new_folder
from gmmvit_deploy.serving.front.options import (
    BUNDLE_HEADER,
    EMBEDDINGS_PATHS,
    FRONT_HEADER,
    FRONT_PATHS,
    RUNNER_HEADER,
    front_paths_of,
)
from gmmvit_deploy.serving.gateway._keys import Client, map_of_keys, map_text, read_keys
from gmmvit_deploy.serving.gateway.haproxy import check_config, find_haproxy, haproxy_version
from gmmvit_deploy.serving.gateway.options import (
    CLIENT_HEADER,
    DEFAULT_IN_FLIGHT,
    DEFAULT_QUEUE_TIMEOUT_MS,
    UNUSED_ADDRESS,
    Front,
    GatewayOptions,
    GatewaySettings,
    HealthCheck,
    Upstream,
)
from gmmvit_deploy.serving.served_models import ServedModels, read_models, read_tuning

CONFIG_FILE = "haproxy.cfg"
_HERE = Path(__file__).parent
ALERTS = _HERE / "alerts.yml"
"""Alert rules for Prometheus over the metrics of ``gmmvit serve``."""
_SERVICES = ("HTTP", "gRPC", "metrics")
_KIB = 1024
_HEADER_BYTES = 16 * _KIB
"""The part of a buffer that holds the headers of a request."""


def gateway_options(
    settings: GatewaySettings,
    models: ServedModels,
    repository: Path,
    *,
    binds: Mapping[str, str],
    upstreams: tuple[Upstream, ...],
    front: Front | None = None,
) -> GatewayOptions:
    """Combine what the user chose with what the repository states.

    The bounds of the queue are those of the user, else those that ``gmmvit tune`` measured, else the defaults.
    binds: ``HTTP``, ``gRPC`` and ``metrics`` → the address to listen on.
    Errors: InputError when the file of ``gmmvit tune`` in the repository is invalid.
    """
    tuned = read_tuning(repository)
    in_flight, timeout = settings.in_flight, settings.queue_timeout_ms
    if in_flight is None:
        in_flight = tuned.in_flight if tuned else DEFAULT_IN_FLIGHT
    if timeout is None:
        timeout = tuned.queue_timeout_ms if tuned else DEFAULT_QUEUE_TIMEOUT_MS
    return GatewayOptions(
        settings=replace(settings, in_flight=in_flight, queue_timeout_ms=timeout),
        binds=binds,
        upstreams=upstreams,
        models=models.names,
        health=models.health,
        buffer_bytes=_buffer_bytes(models),
        front=front,
    )


def options_for(options: GatewayOptions, served: Sequence[ServedModels]) -> GatewayOptions:
    """Return the options for servers with these models, at least one, of which clients may use all."""
    checks = {models.health for models in served}
    differ = "servers with different inputs run side by side; their supervisors probe both"
    either = HealthCheck(path="/v2/health/ready", why_not=differ)
    return replace(
        options,
        models=tuple(sorted({name for models in served for name in models.names})),
        health=checks.pop() if len(checks) == 1 else (either,),
        buffer_bytes=max(map(_buffer_bytes, served)),
    )


def _buffer_bytes(models: ServedModels) -> int:
    """Return the size of HAProxy's buffers: a request with a single image should fit, up to 1 MiB."""
    single_bytes = min(max(models.row_bytes, *(len(check.body) for check in models.health)) + 48 * _KIB, 1024 * _KIB)
    return max(128 * _KIB, -(-single_bytes // (16 * _KIB)) * 16 * _KIB)


def config_text(options: GatewayOptions) -> str:
    """Return the configuration.  ``haproxy -c -f FILE`` checks it."""
    from jinja2 import Environment, StrictUndefined

    # What is written is no HTML.
    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)  # noqa: S701
    template = environment.from_string((_HERE / "haproxy.cfg.jinja").read_text(encoding="utf-8"))
    servers = max(1, sum(upstream.weight > 0 for upstream in options.upstreams))  # that get requests
    text = template.render(
        {field.name: getattr(options, field.name) for field in fields(options)},
        models_pattern="|".join(map(re.escape, options.models)),
        capacity=(options.settings.in_flight or DEFAULT_IN_FLIGHT) * servers,
        waiting_bytes=options.buffer_bytes - _HEADER_BYTES,  # the largest body that fits into a buffer
        bundle_header=BUNDLE_HEADER,
        runner_header=RUNNER_HEADER,
        client_header=CLIENT_HEADER,
        front_header=FRONT_HEADER,
        front_paths=(*FRONT_PATHS, *front_paths_of(options.front.models if options.front else ())),
        embeddings_paths=" ".join(EMBEDDINGS_PATHS),
        unused=UNUSED_ADDRESS,
    )
    return re.sub(r" +$|(?<=\n)\n+(?=    )", "", text, flags=re.MULTILINE)  # a macro leaves an empty line behind it


def tls_pem(settings: GatewaySettings) -> str:
    """Return certificate, chain and private key as a single PEM text; "" without TLS.  Errors: InputError."""
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


def expiry_of(pem: str) -> datetime:
    """Return when the first certificate, which clients get, expires.  Errors: ValueError when it cannot be read."""
    x509 = require("cryptography.x509", package="cryptography", extra="serve")
    expiry: datetime = x509.load_pem_x509_certificate(pem.encode("ascii")).not_valid_after_utc
    return expiry


def _require_not_expired(path: Path, pem: str) -> None:
    """Refuse, with InputError, a file whose first certificate has expired."""
    try:
        expiry = expiry_of(pem)
    except ValueError as exc:
        raise InputError(f"{path}: the certificate cannot be read: {exc}", hint=_TLS_HINT) from exc
    if expiry <= datetime.now(UTC):
        raise InputError(
            f"{path}: the certificate expired on {expiry:%Y-%m-%d} at {expiry:%H:%M} UTC, so clients would refuse it",
            hint=f"replace {path} by a new certificate; openssl x509 -noout -enddate -in {path} prints the date",
        )


_TLS_HINT = "type --tls-cert CHAIN.pem --tls-key KEY.pem, or --tls-cert with a file that contains both"


def write_files(folder: Path, options: GatewayOptions, keys: Mapping[str, Client], pem: str) -> Path:
    """Write all files into ``folder``, readable by the owner only, and return the path of the configuration."""
    texts = {
        CONFIG_FILE: config_text(options),
        "keys.map": map_text(map_of_keys(keys)),
        "bundles.map": map_text({upstream.name: upstream.bundle for upstream in options.upstreams if upstream.bundle}),
        "runners.map": map_text({upstream.name: upstream.runner for upstream in options.upstreams if upstream.runner}),
        "refuse.lua": (_HERE / "refuse.lua").read_text(encoding="utf-8"),
        **({"tls.pem": pem} if pem else {}),
    }
    for name, text in texts.items():
        with os.fdopen(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
    return folder / CONFIG_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnGateway:
    """config: the configuration file.  checked_with: the version of the HAProxy that checked the file, or "".
    notes: sentences for the user.
    """

    config: Path
    checked_with: str
    notes: tuple[str, ...]


def gateway_folder(
    path: Path,
    out: Path,
    settings: GatewaySettings,
    *,
    ports: tuple[int, int, int],
    triton: str = "127.0.0.1",
    triton_ports: tuple[int, int, int] = (8000, 8001, 8002),
    name: str = "gmmvit",
    force: bool = False,
) -> OwnGateway:
    """Write ``haproxy.cfg`` and its files to ``out``: hashes of the keys, the Lua program, certificate and private key.

    ``alerts.yml`` beside them has alert rules for Prometheus.

    path: a bundle or a repository.  name: the name of the model, for a bundle.
    ports, triton_ports: for HTTP, gRPC and metrics.
    Errors: InputError for an invalid key file or certificate. RepositoryError when ``path`` has no models. OutputError
    when ``out`` exists and ``force`` is False. ServerError when the installed HAProxy refuses the configuration.
    """
    keys, pem = read_keys(settings.keys), tls_pem(settings)
    models = read_models(path, name=name)
    http, grpc, metrics = (f"{triton}:{port}" for port in triton_ports)
    options = gateway_options(
        settings,
        models,
        path,
        binds={service: f"{settings.listen}:{port}" for service, port in zip(_SERVICES, ports, strict=True)},
        upstreams=(
            Upstream(name="triton", http=http, grpc=grpc, metrics=metrics, bundle=models.bundle, runner=models.runner),
        ),
    )
    notes = []
    with new_folder(out, force=force) as folder:
        config = write_files(folder, options, keys, pem)
        shutil.copy(ALERTS, folder)
        try:
            program = find_haproxy()
        except ServerError as exc:
            checked_with = ""
            notes.append(f"the configuration was not checked: {exc}; {exc.hint}")
        else:
            check_config(program, config)
            checked_with = haproxy_version(program)
    whys = [check.why_not for check in models.health if check.why_not]
    notes += [f"the readiness of the gateway does not run the network: {why}" for why in whys]
    notes.append("keys.map holds the hashes of the keys; repeat this command after a change of the key file")
    return OwnGateway(config=out / CONFIG_FILE, checked_with=checked_with, notes=tuple(notes))
