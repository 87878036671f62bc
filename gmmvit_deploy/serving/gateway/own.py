"""Write a folder with the configuration for the user's own HAProxy, as ``gmmvit gateway`` does."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.files.writing import new_folder
from gmmvit_deploy.serving.gateway._keys import read_keys
from gmmvit_deploy.serving.gateway.files import ALERTS, CONFIG_FILE, gateway_options, tls_pem, write_files
from gmmvit_deploy.serving.gateway.haproxy import check_config, find_haproxy, haproxy_version
from gmmvit_deploy.serving.gateway.options import GatewaySettings, Upstream
from gmmvit_deploy.serving.served_models import read_models

_SERVICES = ("HTTP", "gRPC", "metrics")


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
    if not models.health.infers:
        notes.append(f"the readiness of the gateway does not run the network: {models.health.why_not}")
    notes.append("keys.map holds the hashes of the keys; repeat this command after a change of the key file")
    return OwnGateway(config=out / CONFIG_FILE, checked_with=checked_with, notes=tuple(notes))
