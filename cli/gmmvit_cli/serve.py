from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from gmmvit_cli.options import CPU_KERNELS, cpu_kernels_from
from gmmvit_cli.output import JSON_OPTION, note, print_json


def serve(
    path: Path = typer.Argument(metavar="BUNDLE_OR_REPOSITORY", help="A bundle, or a Triton model repository."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on. Anything but loopback lets strangers in."),
    http_port: int = typer.Option(8000, help="0 takes a free one."),
    grpc_port: int = typer.Option(8001, help="0 takes a free one."),
    metrics_port: int = typer.Option(8002, help="0 takes a free one."),
    tritonserver: Path | None = typer.Option(
        None, help="The server to run; else the one on PATH, else the one in the nvidia-pytriton wheel."
    ),
    log: Path | None = typer.Option(None, help="File for the server's log; else it goes to stderr."),
    cpu_kernels: str | None = CPU_KERNELS,
    start_timeout: float = typer.Option(120.0, help="Seconds until every model must be ready."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Run a real Triton server until Ctrl-C or SIGTERM; leaves no process behind."""
    from gmmvit_deploy.serving.repository import CpuKernelsUse
    from gmmvit_deploy.serving.server import ServerOptions, TritonServer
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

    def ready(server: TritonServer) -> None:
        where = {
            "grpc": server.grpc_url,
            "http": server.http_url,
            "metrics": server.metrics_url,
            "repository": str(server.repository),
            "pid": server.pid,
            "cpu_kernels": asdict(used[0]) if used else None,  # a repository that is not ours states nothing
        }
        if as_json:
            print_json(where)
        else:
            typer.echo(f"ready: {server.grpc_url}  {server.http_url}  metrics {server.metrics_url}")

    serve_path(
        path,
        options,
        cpu_kernels=cpu_kernels_from(cpu_kernels),
        tritonserver=tritonserver,
        on_kernels=on_kernels,
        on_ready=ready,
        on_log_line=note if log is None else None,
    )
