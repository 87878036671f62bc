from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from gmmvit_cli.options import AS_JSON, FORCE, MODEL_NAME, of_fields
from gmmvit_cli.output import note, print_json
from gmmvit_cli.panels import INPUT, TARGET, Panel, output_option
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.serving.front.options import DEFAULT_BODY_BYTES
from gmmvit_deploy.serving.gateway.options import DEFAULT_QUEUE_LIMIT, GatewaySettings

EXAMPLE = """gmmvit gateway bundle -o gateway --keys keys.txt
gmmvit gateway models -o gateway --keys keys.txt --tls-cert cert.pem"""

GATEWAY = Panel("Gateway")
LOOPBACK = "127.0.0.1"


def options_of_gateways(
    listen: str | None = GATEWAY.option(
        "ADDRESS",
        "Address for the gateway to listen on; 0.0.0.0 means all addresses. Any address but loopback needs --tls-cert "
        "or --insecure.",
        show_default=LOOPBACK,
    ),
    keys: Path | None = GATEWAY.option(
        "FILE",
        "Key file with a line NAME KEY for each client, required for a gateway; models=NAME,NAME at its end opens only "
        "these models. 'gmmvit serve' reloads a changed file.",
        must_exist=True,
    ),
    tls_cert: Path | None = GATEWAY.option("FILE", "PEM file of the certificate and its chain.", must_exist=True),
    tls_key: Path | None = GATEWAY.option(
        "FILE",
        "PEM file of the private key, without a password.",
        must_exist=True,
        show_default="in the file of --tls-cert",
    ),
    insecure: bool = GATEWAY.flag(
        "--insecure",
        "Permit connections from other machines without TLS; in 'gmmvit serve', also without a gateway.",
    ),
    max_body: int = GATEWAY.option(
        "BYTES", "Maximum size of a request in bytes.", min=1024, default=DEFAULT_BODY_BYTES
    ),
    allow_json: int = GATEWAY.option(
        "BYTES",
        "Accept tensors in JSON in requests of at most this size in bytes; 0 refuses tensors in JSON. For a uint8 "
        "input, Triton reads 300 in JSON as 44, without an error.",
        min=0,
        default=0,
    ),
    in_flight: int | None = GATEWAY.option(
        "N",
        "Maximum number of requests that Triton gets at the same time, for each of HTTP, gRPC and "
        "POST /classify; further requests wait in the gateway.",
        min=1,
        show_default="from the measurement of gmmvit tune, else 16",
    ),
    queue_limit: int = GATEWAY.option(
        "N",
        "Maximum number of requests that wait in the gateway, all protocols together; further requests are refused "
        "at once.",
        min=0,
        default=DEFAULT_QUEUE_LIMIT,
    ),
    queue_timeout: int | None = GATEWAY.option(
        "MS",
        "Maximum time that a request waits in the gateway, in milliseconds; then it is refused.",
        min=1,
        show_default="the latency limit of gmmvit tune, else 250",
    ),
) -> None:
    """Declare what `gateway_settings` reads."""


SHARED = (options_of_gateways,)


def gateway(
    context: typer.Context,
    path: Path = INPUT.argument(
        "BUNDLE_OR_REPOSITORY", "The bundle or Triton model repository that your Triton server serves."
    ),
    out: Path = output_option(
        "FOLDER",
        "Folder to write to: haproxy.cfg and the files that it needs.",
        default=Path("gateway"),
    ),
    triton: str = TARGET.option(
        "HOST", "Host of the Triton server. Only the gateway must be able to reach Triton's ports.", default=LOOPBACK
    ),
    triton_ports: str = TARGET.option("PORTS", "Triton's ports for HTTP, gRPC and metrics.", default="8000,8001,8002"),
    ports: str = GATEWAY.option("PORTS", "The gateway's ports for HTTP, gRPC and metrics.", default="8443,8444,8445"),
    name: str = MODEL_NAME,
    force: bool = FORCE,
    as_json: bool = AS_JSON,
) -> None:
    """With this configuration, HAProxy checks keys, does TLS, refuses requests that Triton must not get, and limits
    how long requests wait. If HAProxy is installed, the command checks the configuration with 'haproxy -c'. Start
    HAProxy with 'haproxy -f FOLDER/haproxy.cfg'. The command 'gmmvit serve --gateway' starts HAProxy and Triton itself,
    with the same rules.
    """
    from gmmvit_deploy.serving.gateway.files import gateway_folder
    from gmmvit_deploy.serving.served_models import read_models

    read_models(path, name=name)  # a wrong path is reported before a missing option
    written = gateway_folder(
        path,
        out,
        gateway_settings(context.params),
        ports=_ports_from("--ports", ports),
        triton=triton,
        triton_ports=_ports_from("--triton-ports", triton_ports),
        name=name,
        force=force,
    )
    for line in written.notes:
        note(line)
    if as_json:
        print_json(asdict(written))
        return
    typer.echo(written.config)


def gateway_settings(given: dict[str, Any]) -> GatewaySettings:
    """Build the settings from the parameters of a command.  Errors: InputError without a key file."""
    if given["keys"] is None:
        raise InputError("a gateway needs --keys FILE", hint="write a file with a line NAME KEY for each client")
    return GatewaySettings(
        max_body_bytes=given["max_body"],
        json_bytes=given["allow_json"],
        queue_timeout_ms=given["queue_timeout"],
        **{**of_fields(GatewaySettings, given), "listen": given["listen"] or LOOPBACK},
    )


def _ports_from(option: str, text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() and 0 < int(part) < 65536 for part in parts):
        raise InputError(
            f"{option}: expected three ports, for HTTP, gRPC and metrics, such as 8000,8001,8002, got {text!r}"
        )
    http, grpc, metrics = (int(part) for part in parts)
    return http, grpc, metrics
