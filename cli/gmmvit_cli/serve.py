from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gmmvit_cli.gateway import GATEWAY, LOOPBACK, settings_from
from gmmvit_cli.options import REQUEST_PIXELS, RUNNER, TRITONSERVER
from gmmvit_cli.output import note, print_json
from gmmvit_cli.panels import INPUT, JSON_OPTION, OUTPUT, TARGET, together, typed
from gmmvit_cli.progress import progress
from gmmvit_deploy.errors import InputError

if TYPE_CHECKING:
    from gmmvit_deploy.serving.gateway.options import GatewaySettings

EXAMPLE = """gmmvit serve bundle
gmmvit serve model_repository --http-port 0 --grpc-port 0 --log server.log
gmmvit serve bundle --gateway --keys keys.txt --tls-cert cert.pem"""


def serve(
    path: Path | None = INPUT.argument(
        "BUNDLE_OR_REPOSITORY",
        "The bundle or Triton model repository to serve. With --state, only the first start needs a bundle.",
        default=None,
        show_default=False,
    ),
    host: str = TARGET.option(
        "ADDRESS",
        "Address to listen on without a gateway. Any address but loopback (127.0.0.1) needs --insecure, because "
        "other machines could then send requests without a key.",
        default=LOOPBACK,
    ),
    http_port: int = TARGET.option("PORT", "Port for HTTP; 0 chooses a free port.", default=8000, min=0, max=65535),
    grpc_port: int = TARGET.option("PORT", "Port for gRPC; 0 chooses a free port.", default=8001, min=0, max=65535),
    metrics_port: int = TARGET.option(
        "PORT", "Port for metrics; 0 chooses a free port.", default=8002, min=0, max=65535
    ),
    classify_port: int | None = TARGET.option(
        "PORT",
        "Port on loopback for POST /classify, which takes image files, and for a page to try it; 0 chooses a free "
        "port. With --gateway, /classify is on the port for HTTP.",
        show_default="8080",
        min=0,
        max=65535,
    ),
    tritonserver: Path | None = TRITONSERVER,
    start_timeout: float = TARGET.option(
        "S", "Maximum time in seconds until all models are ready, at the start and at each restart.", default=120.0
    ),
    runner: str | None = RUNNER,
    request_pixels: int | None = REQUEST_PIXELS,
    gateway: bool = GATEWAY.flag(
        "--gateway",
        "Run HAProxy in front of the server: keys, TLS, limits, and a queue. Needs --keys. HAProxy then listens "
        "on the ports for HTTP, gRPC and metrics.",
    ),
    settings: partial[GatewaySettings] = together(settings_from),
    access_log: Path | None = OUTPUT.option(
        "FILE", "File to which the gateway appends a line of JSON for each request.", show_default="stderr"
    ),
    state: Path | None = GATEWAY.option(
        "DIR",
        "State folder, which the command creates; needs --gateway. 'gmmvit rollout' replaces the bundle of a "
        "service with a state folder. After a restart, the service serves the bundle of the last successful rollout.",
    ),
    log: Path | None = OUTPUT.option(
        "FILE",
        "File to which the lines of Triton and about its restarts are appended. Lines of the gateway and of "
        "rollouts go to stderr.",
        show_default="stderr",
    ),
    as_json: bool = JSON_OPTION,
) -> None:
    """A bundle is the folder that the command 'gmmvit export' writes. A Triton model repository is the folder that the
    command 'gmmvit repository' writes. The command prints the
    addresses of the server when all models are ready. It restarts a server that has died, on the same ports. On SIGTERM
    and SIGINT, the server completes the requests in progress, and the command ends with status 0.
    """
    with_gateway = None
    if gateway:
        if host != LOOPBACK:
            raise InputError("--host and --gateway exclude each other", hint=f"type --listen {host} in place of --host")
        if classify_port is not None:
            hint = "remove --classify-port: /classify is then on the port of --http-port"
            raise InputError("--classify-port and --gateway exclude each other", hint=hint)
        with_gateway = settings(access_log=access_log)
    else:
        of_gateway = [*typed(settings), *([] if access_log is None else ["--access-log"])]
        for option in of_gateway:
            if option != "--insecure":
                raise InputError(f"{option} needs --gateway", hint=f"add --gateway, or remove {option}")
    from gmmvit_deploy.serving.front.options import CLASSIFY_PATH, DEFAULT_CLASSIFY_PORT
    from gmmvit_deploy.serving.gateway.service import Gateway
    from gmmvit_deploy.serving.run import serve_path
    from gmmvit_deploy.serving.server import ServerOptions, TritonServer
    from gmmvit_deploy.serving.server_log import stamped
    from gmmvit_deploy.serving.service import Service

    options = ServerOptions(
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        start_timeout_s=start_timeout,
        log_path=log,
    )

    shown = ExitStack()

    def announce(entry: Service | Gateway, server: TritonServer, opened: Gateway | None, classify: str | None) -> None:
        shown.close()
        where = {
            "grpc": entry.grpc_url,
            "http": entry.http_url,
            "metrics": entry.metrics_url,
            "classify": classify,
            "repository": str(server.repository),
            "pid": server.pid,
            "gateway_pid": opened.pid if opened else None,
            "bundle": server.models.bundle or None,  # repositories of other tools state neither
            "runner": server.models.runner or None,
        }
        if as_json:
            print_json(where)
        else:
            ready = f"ready: {entry.grpc_url}  {entry.http_url}  metrics {entry.metrics_url}"
            ready += f"  classify {classify}" if classify else ""
            typer.echo(ready + (f"  {server.models.runner}" if server.models.runner else ""))

    if state is not None:
        if with_gateway is None:
            hint = "type gmmvit serve BUNDLE --gateway --keys FILE --state DIR"
            raise InputError("--state needs --gateway", hint=hint)
        from gmmvit_deploy.serving.rollout.run import serve_with_state

        with shown:
            serve_with_state(
                path,
                state,
                options,
                with_gateway,
                runner=runner,
                request_pixels=request_pixels,
                tritonserver=tritonserver,
                on_ready=lambda gateway, replicas: announce(
                    gateway, replicas.server, gateway, f"{gateway.http_url}{CLASSIFY_PATH}" if replicas.front else None
                ),
                on_log_line=note if log is None else None,
                on_gateway_line=lambda line: note(stamped(line)),
                on_progress=shown.enter_context(progress("serve")),
            )
        return
    if path is None:
        raise InputError("expected a bundle or a repository to serve", hint="type gmmvit serve BUNDLE")
    with shown:
        serve_path(
            path,
            options,
            runner=runner,
            request_pixels=request_pixels,
            tritonserver=tritonserver,
            classify_port=DEFAULT_CLASSIFY_PORT if classify_port is None else classify_port,
            gateway=with_gateway,
            insecure=settings.keywords["insecure"],
            on_note=note,
            on_ready=lambda service: announce(service, service.server, service.gateway, service.classify_url),
            on_log_line=note if log is None else None,
            on_gateway_line=lambda line: note(stamped(line)),
            on_progress=shown.enter_context(progress("serve")),
        )
