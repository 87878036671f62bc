from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import typer

from gmmvit_cli.gateway_options import (
    ACCESS_LOG,
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
    require_no_gateway_options,
    settings_from,
)
from gmmvit_cli.options import (
    CPU_KERNELS,
    INPUT,
    OUTPUT,
    REQUEST_PIXELS,
    TARGET,
    TRITONSERVER,
    cpu_kernels_from,
)
from gmmvit_cli.output import JSON_OPTION, note, print_json
from gmmvit_cli.progress import progress
from gmmvit_deploy.errors import InputError

EXAMPLE = """gmmvit serve bundle
gmmvit serve model_repository --http-port 0 --grpc-port 0 --log server.log
gmmvit serve bundle --gateway --keys keys.txt --tls-cert cert.pem"""


def serve(
    context: typer.Context,
    path: Path | None = typer.Argument(
        None,
        metavar="BUNDLE_OR_REPOSITORY",
        rich_help_panel=INPUT,
        show_default=False,
        help="The bundle or Triton model repository to serve. With --state, only the first start needs a bundle.",
    ),
    host: str = typer.Option(
        LOOPBACK,
        metavar="ADDRESS",
        rich_help_panel=TARGET,
        help="Address to listen on without a gateway. Any address but loopback (127.0.0.1) needs --insecure, because "
        "other machines could then send requests without a key.",
    ),
    http_port: int = typer.Option(
        8000, min=0, max=65535, metavar="PORT", rich_help_panel=TARGET, help="Port for HTTP; 0 chooses a free port."
    ),
    grpc_port: int = typer.Option(
        8001, min=0, max=65535, metavar="PORT", rich_help_panel=TARGET, help="Port for gRPC; 0 chooses a free port."
    ),
    metrics_port: int = typer.Option(
        8002, min=0, max=65535, metavar="PORT", rich_help_panel=TARGET, help="Port for metrics; 0 chooses a free port."
    ),
    tritonserver: Path | None = TRITONSERVER,
    start_timeout: float = typer.Option(
        120.0,
        metavar="S",
        rich_help_panel=TARGET,
        help="Maximum time in seconds until all models are ready, at the start and at each restart.",
    ),
    cpu_kernels: str | None = CPU_KERNELS,
    request_pixels: int | None = REQUEST_PIXELS,
    gateway: bool = typer.Option(
        False,
        "--gateway",
        rich_help_panel=GATEWAY,
        help="Run HAProxy in front of the server: keys, TLS, limits, and a queue. Needs --keys. HAProxy then listens "
        "on the ports for HTTP, gRPC and metrics.",
    ),
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
    access_log: Path | None = ACCESS_LOG,
    state: Path | None = typer.Option(
        None,
        "--state",
        metavar="DIR",
        rich_help_panel=GATEWAY,
        help="State folder, which the command creates; needs --gateway. 'gmmvit rollout' replaces the bundle of a "
        "service with a state folder. After a restart, the service serves the bundle of the last successful rollout.",
    ),
    log: Path | None = typer.Option(
        None,
        metavar="FILE",
        rich_help_panel=OUTPUT,
        show_default="stderr",
        help="File to which the lines of Triton and about its restarts are appended. Lines of the gateway and of "
        "rollouts go to stderr.",
    ),
    as_json: bool = JSON_OPTION,
) -> None:
    """A bundle is the folder that the command 'gmmvit export' writes. A Triton model repository is the folder that the
    command 'gmmvit repository' writes. The command prints the
    addresses of the server when all models are ready. It restarts a server that has died, on the same ports. On SIGTERM
    and SIGINT, the server completes the requests in progress, and the command ends with status 0.
    """
    settings = None
    if gateway:
        if host != LOOPBACK:
            raise InputError("--host and --gateway exclude each other", hint=f"type --listen {host} in place of --host")
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
            access_log=access_log,
        )
    else:
        require_no_gateway_options(context)
    from gmmvit_deploy.serving.gateway.service import Gateway
    from gmmvit_deploy.serving.repository import CpuKernelsUse
    from gmmvit_deploy.serving.server import ServerOptions, TritonServer
    from gmmvit_deploy.serving.server_log import stamped
    from gmmvit_deploy.serving.service import Service
    from gmmvit_deploy.serving.serving import serve_path

    options = ServerOptions(
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        start_timeout_s=start_timeout,
        log_path=log,
    )

    used: list[CpuKernelsUse] = []

    def on_kernels(use: CpuKernelsUse) -> None:
        used.append(use)
        note(f"cpu kernels: {use}")

    shown = ExitStack()

    def announce(entry: Service | Gateway, server: TritonServer, opened: Gateway | None) -> None:
        shown.close()
        where = {
            "grpc": entry.grpc_url,
            "http": entry.http_url,
            "metrics": entry.metrics_url,
            "repository": str(server.repository),
            "pid": server.pid,
            "gateway_pid": opened.pid if opened else None,
            "cpu_kernels": asdict(used[0]) if used else None,  # repositories of other tools state nothing
        }
        if as_json:
            print_json(where)
        else:
            typer.echo(f"ready: {entry.grpc_url}  {entry.http_url}  metrics {entry.metrics_url}")

    if state is not None:
        if settings is None:
            hint = "type gmmvit serve BUNDLE --gateway --keys FILE --state DIR"
            raise InputError("--state needs --gateway", hint=hint)
        from gmmvit_deploy.serving.rollout.serving import serve_with_state

        with shown:
            serve_with_state(
                path,
                state,
                options,
                settings,
                cpu_kernels=cpu_kernels_from(cpu_kernels),
                request_pixels=request_pixels,
                tritonserver=tritonserver,
                on_ready=lambda gateway, slots: announce(gateway, slots.server, gateway),
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
            cpu_kernels=cpu_kernels_from(cpu_kernels),
            request_pixels=request_pixels,
            tritonserver=tritonserver,
            gateway=settings,
            insecure=insecure,
            on_kernels=on_kernels,
            on_ready=lambda service: announce(service, service.server, service.gateway),
            on_log_line=note if log is None else None,
            on_gateway_line=lambda line: note(stamped(line)),
            on_progress=shown.enter_context(progress("serve")),
        )
