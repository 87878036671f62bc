from __future__ import annotations

from pathlib import Path

import typer

from gmmvit_cli.gateway_options import (
    ALLOW_JSON,
    GATEWAY,
    IN_FLIGHT,
    INSECURE,
    KEYS,
    LISTEN,
    LOOPBACK,
    MAX_BODY,
    QUEUE_LIMIT,
    QUEUE_TIMEOUT,
    TLS_CERT,
    TLS_KEY,
    settings_from,
)
from gmmvit_cli.options import FORCE, INPUT, NAME, OUTPUT, TARGET, require_output
from gmmvit_cli.output import JSON_OPTION, note, print_json
from gmmvit_deploy.errors import InputError

EXAMPLE = """gmmvit gateway bundle -o gateway --keys keys.txt
gmmvit gateway models -o gateway --keys keys.txt --tls-cert cert.pem"""


def gateway(
    path: Path = typer.Argument(
        metavar="BUNDLE_OR_REPOSITORY",
        rich_help_panel=INPUT,
        help="The bundle or Triton model repository that your Triton server serves.",
    ),
    out: Path = typer.Option(
        Path("gateway"),
        "-o",
        "--output",
        metavar="FOLDER",
        rich_help_panel=OUTPUT,
        help="Folder to write to: haproxy.cfg and the files that it needs.",
    ),
    triton: str = typer.Option(
        LOOPBACK,
        metavar="HOST",
        rich_help_panel=TARGET,
        help="Host of the Triton server. Only the gateway must be able to reach Triton's ports.",
    ),
    triton_ports: str = typer.Option(
        "8000,8001,8002",
        metavar="PORTS",
        rich_help_panel=TARGET,
        help="Triton's ports for HTTP, gRPC and metrics.",
    ),
    ports: str = typer.Option(
        "8443,8444,8445",
        metavar="PORTS",
        rich_help_panel=GATEWAY,
        help="The gateway's ports for HTTP, gRPC and metrics.",
    ),
    name: str = NAME,
    listen: str | None = LISTEN,
    keys: Path | None = KEYS,
    tls_cert: Path | None = TLS_CERT,
    tls_key: Path | None = TLS_KEY,
    insecure: bool = INSECURE,
    max_body: int = MAX_BODY,
    allow_json: int = ALLOW_JSON,
    in_flight: int | None = IN_FLIGHT,
    queue_limit: int = QUEUE_LIMIT,
    queue_timeout: int | None = QUEUE_TIMEOUT,
    force: bool = FORCE,
    as_json: bool = JSON_OPTION,
) -> None:
    """With this configuration, HAProxy checks keys, does TLS, refuses requests that Triton must not get, and limits
    how long requests wait. If HAProxy is installed, the command checks the configuration with 'haproxy -c'. Start
    HAProxy with 'haproxy -f FOLDER/haproxy.cfg'. The command 'gmmvit serve --gateway' starts HAProxy and Triton itself,
    with the same rules.
    """
    require_output(out, force=force)
    from gmmvit_deploy.serving.gateway.own import gateway_folder
    from gmmvit_deploy.serving.served_models import read_models

    read_models(path, name=name)  # a wrong path is reported before a missing option
    settings = settings_from(
        listen=listen,
        keys=keys,
        tls_cert=tls_cert,
        tls_key=tls_key,
        insecure=insecure,
        max_body=max_body,
        allow_json=allow_json,
        in_flight=in_flight,
        queue_limit=queue_limit,
        queue_timeout=queue_timeout,
    )
    written = gateway_folder(
        path,
        out,
        settings,
        ports=_three("--ports", ports),
        triton=triton,
        triton_ports=_three("--triton-ports", triton_ports),
        name=name,
        force=force,
    )
    for line in written.notes:
        note(line)
    if as_json:
        print_json({"config": str(written.config), "checked_with": written.checked_with, "notes": written.notes})
        return
    typer.echo(written.config)


def _three(option: str, text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() and 0 < int(part) < 65536 for part in parts):
        raise InputError(
            f"{option}: expected three ports, for HTTP, gRPC and metrics, such as 8000,8001,8002, got {text!r}"
        )
    http, grpc, metrics = (int(part) for part in parts)
    return http, grpc, metrics
