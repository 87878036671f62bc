"""Options of the gateway, which ``gmmvit serve`` and ``gmmvit gateway`` share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gmmvit_cli.options import OUTPUT, existing
from gmmvit_deploy.errors import InputError

if TYPE_CHECKING:
    from gmmvit_deploy.serving.gateway.options import GatewaySettings

__all__ = [
    "ACCESS_LOG",
    "ALLOW_JSON",
    "GATEWAY",
    "INSECURE",
    "IN_FLIGHT",
    "KEYS",
    "LISTEN",
    "LOOPBACK",
    "MAX_BODY",
    "QUEUE_LIMIT",
    "QUEUE_TIMEOUT",
    "TLS_CERT",
    "TLS_KEY",
    "require_no_gateway_options",
    "settings_from",
]

GATEWAY = "Gateway"
LOOPBACK = "127.0.0.1"

LISTEN = typer.Option(
    None,
    "--listen",
    metavar="ADDRESS",
    rich_help_panel=GATEWAY,
    show_default=LOOPBACK,
    help="Address for the gateway to listen on; 0.0.0.0 means all addresses. Any address but loopback needs --tls-cert "
    "or --insecure.",
)
KEYS = typer.Option(
    None,
    "--keys",
    metavar="FILE",
    rich_help_panel=GATEWAY,
    callback=existing("--keys"),
    help="Key file with a line NAME KEY for each client, required for a gateway. 'gmmvit serve' reloads a "
    "changed file.",
)
TLS_CERT = typer.Option(
    None,
    "--tls-cert",
    metavar="FILE",
    rich_help_panel=GATEWAY,
    callback=existing("--tls-cert"),
    help="PEM file of the certificate and its chain.",
)
TLS_KEY = typer.Option(
    None,
    "--tls-key",
    metavar="FILE",
    rich_help_panel=GATEWAY,
    show_default="in the file of --tls-cert",
    callback=existing("--tls-key"),
    help="PEM file of the private key, without a password.",
)
INSECURE = typer.Option(
    False,
    "--insecure",
    rich_help_panel=GATEWAY,
    help="Permit connections from other machines without TLS; in 'gmmvit serve', also without a gateway.",
)
MAX_BODY = typer.Option(
    16 * 2**20,
    "--max-body",
    min=1024,
    metavar="BYTES",
    rich_help_panel=GATEWAY,
    help="Maximum size of a request in bytes.",
)
ALLOW_JSON = typer.Option(
    0,
    "--allow-json",
    min=0,
    metavar="BYTES",
    rich_help_panel=GATEWAY,
    help="Accept tensors in JSON in requests of at most this size in bytes; 0 refuses tensors in JSON. For a uint8 "
    "input, Triton reads 300 in JSON as 44, without an error.",
)
IN_FLIGHT = typer.Option(
    None,
    "--in-flight",
    min=1,
    metavar="N",
    rich_help_panel=GATEWAY,
    show_default="from the measurement of gmmvit tune, else 16",
    help="Maximum number of requests that Triton gets at the same time, for each of HTTP, gRPC and "
    "POST /classify; further requests wait in the gateway.",
)
QUEUE_LIMIT = typer.Option(
    256,
    "--queue-limit",
    min=0,
    metavar="N",
    rich_help_panel=GATEWAY,
    help="Maximum number of requests that wait in the gateway, all protocols together; further requests are refused "
    "at once.",
)
QUEUE_TIMEOUT = typer.Option(
    None,
    "--queue-timeout",
    min=1,
    metavar="MS",
    rich_help_panel=GATEWAY,
    show_default="the latency limit of gmmvit tune, else 250",
    help="Maximum time that a request waits in the gateway, in milliseconds; then it is refused.",
)
ACCESS_LOG = typer.Option(
    None,
    "--access-log",
    metavar="FILE",
    rich_help_panel=OUTPUT,
    show_default="stderr",
    help="File to which the gateway appends a line of JSON for each request.",
)


_WITHOUT_GATEWAY = ("gateway", "insecure", "state")
"""Options of the panel that mean something without a gateway, or have an error of their own."""


def require_no_gateway_options(context: typer.Context) -> None:
    """Refuse the options of a gateway in a command without a gateway.

    Errors: InputError.
    """
    for option in context.command.params:
        panel = getattr(option, "rich_help_panel", "")
        belongs = (panel == GATEWAY and option.name not in _WITHOUT_GATEWAY) or option.name == "access_log"
        source = context.get_parameter_source(option.name or "")
        if belongs and source is not None and source.name == "COMMANDLINE":
            raise InputError(f"{option.opts[0]} needs --gateway", hint=f"add --gateway, or remove {option.opts[0]}")


def settings_from(
    *,
    listen: str | None,
    keys: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    insecure: bool,
    max_body: int,
    allow_json: int,
    in_flight: int | None,
    queue_limit: int,
    queue_timeout: int | None,
    access_log: Path | None = None,
) -> GatewaySettings:
    """Return the settings of a gateway.  Errors: InputError for invalid settings, and without a key file."""
    from gmmvit_deploy.serving.gateway.options import GatewaySettings

    if keys is None:
        raise InputError("a gateway needs --keys FILE", hint="write a file with a line NAME KEY for each client")
    return GatewaySettings(
        keys=keys,
        listen=listen or LOOPBACK,
        tls_cert=tls_cert,
        tls_key=tls_key,
        insecure=insecure,
        max_body_bytes=max_body,
        json_bytes=allow_json,
        in_flight=in_flight,
        queue_limit=queue_limit,
        queue_timeout_ms=queue_timeout,
        access_log=access_log,
    )
