from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import typer

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

EXAMPLE = """gmmvit serve bundle
gmmvit serve model_repository --http-port 0 --grpc-port 0 --log server.log"""


def serve(
    path: Path = typer.Argument(
        metavar="BUNDLE_OR_REPOSITORY", rich_help_panel=INPUT, help="The bundle or Triton model repository to serve."
    ),
    host: str = typer.Option(
        "127.0.0.1",
        metavar="ADDRESS",
        rich_help_panel=TARGET,
        help="Address to listen on. Other machines can reach the server unless the address is loopback (127.0.0.1).",
    ),
    http_port: int = typer.Option(
        8000, metavar="PORT", rich_help_panel=TARGET, help="Port for HTTP; 0 chooses a free port."
    ),
    grpc_port: int = typer.Option(
        8001, metavar="PORT", rich_help_panel=TARGET, help="Port for gRPC; 0 chooses a free port."
    ),
    metrics_port: int = typer.Option(
        8002, metavar="PORT", rich_help_panel=TARGET, help="Port for metrics; 0 chooses a free port."
    ),
    tritonserver: Path | None = TRITONSERVER,
    start_timeout: float = typer.Option(
        120.0, metavar="S", rich_help_panel=TARGET, help="Maximum time in seconds until all models are ready."
    ),
    cpu_kernels: str | None = CPU_KERNELS,
    request_pixels: int | None = REQUEST_PIXELS,
    log: Path | None = typer.Option(
        None, metavar="FILE", rich_help_panel=OUTPUT, show_default="stderr", help="File to write the server's log to."
    ),
    as_json: bool = JSON_OPTION,
) -> None:
    """A bundle is the folder that the command 'gmmvit export' writes. A Triton model repository is the folder that the
    command 'gmmvit repository' writes. The command prints the
    addresses of the server when all models are ready. It restarts a server that has died, on the same ports. On SIGTERM
    and SIGINT, the server completes the requests in progress, and the command ends with status 0.
    """
    from gmmvit_deploy.serving.repository import CpuKernelsUse
    from gmmvit_deploy.serving.server import ServerOptions
    from gmmvit_deploy.serving.serving import Service, serve_path

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

    def ready(service: Service) -> None:
        shown.close()
        server = service.server
        where = {
            "grpc": server.grpc_url,
            "http": server.http_url,
            "metrics": service.metrics_url,
            "repository": str(server.repository),
            "pid": server.pid,
            "cpu_kernels": asdict(used[0]) if used else None,  # repositories of other tools state nothing
        }
        if as_json:
            print_json(where)
        else:
            typer.echo(f"ready: {server.grpc_url}  {server.http_url}  metrics {service.metrics_url}")

    with shown:
        serve_path(
            path,
            options,
            cpu_kernels=cpu_kernels_from(cpu_kernels),
            request_pixels=request_pixels,
            tritonserver=tritonserver,
            on_kernels=on_kernels,
            on_ready=ready,
            on_log_line=note if log is None else None,
            on_progress=shown.enter_context(progress("serve")),
        )
