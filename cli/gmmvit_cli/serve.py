from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import typer

from gmmvit_cli.gateway import GATEWAY, LOOPBACK, gateway_settings, options_of_gateways
from gmmvit_cli.options import AS_JSON, REQUEST_PIXELS, RUNNER_OF_GRAPHS, TRITONSERVER, of_fields, typed
from gmmvit_cli.output import note, print_json
from gmmvit_cli.panels import INPUT, OUTPUT, TARGET, refusals_of
from gmmvit_cli.progress import progress
from gmmvit_deploy.arguments import Refusals
from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.serving.gateway.options import GatewaySettings, require_insecure

COLLECTS = True
SHARED = (options_of_gateways,)
EXAMPLE = """gmmvit serve bundle
gmmvit serve shop cats=cats_bundle fraud
gmmvit serve model_repository --http-port 0 --grpc-port 0 --log server.log
gmmvit serve bundle --gateway --keys keys.txt --tls-cert cert.pem"""


def serve(
    context: typer.Context,
    paths: list[str] | None = INPUT.argument(
        "BUNDLE_OR_REPOSITORY",
        "The bundle or Triton model repository to serve. With --state, only the first start needs bundles. Several "
        "bundles are served under the names of their folders; NAME=BUNDLE states another name.",
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
        "Port on loopback for POST /classify and /embed, which take image files, and for a page to try it; 0 chooses a "
        "free port. With --gateway, both are on the port for HTTP.",
        show_default="8080",
        min=0,
        max=65535,
    ),
    tritonserver: Path | None = TRITONSERVER,
    start_timeout: float = TARGET.option(
        "S", "Maximum time in seconds until all models are ready, at the start and at each restart.", default=120.0
    ),
    runner: str | None = RUNNER_OF_GRAPHS,
    request_pixels: int | None = REQUEST_PIXELS,
    strict: bool = INPUT.flag(
        "--strict",
        "End with an error if one of several bundles is broken. By default, the others are served, but not with "
        "--state.",
    ),
    gateway: bool = GATEWAY.flag(
        "--gateway",
        "Run HAProxy in front of the server: keys, TLS, limits, and a queue. Needs --keys. HAProxy then listens "
        "on the ports for HTTP, gRPC and metrics.",
    ),
    access_log: Path | None = OUTPUT.option(
        "FILE", "File to which the gateway appends a line of JSON for each request.", show_default="stderr"
    ),
    state: Path | None = GATEWAY.option(
        "DIR",
        "State folder, which the command creates; needs --gateway. 'gmmvit rollout' replaces a bundle of a service "
        "with a state folder. After a restart, the service serves the bundles of the last successful rollouts.",
    ),
    log: Path | None = OUTPUT.option(
        "FILE",
        "File to which the lines of Triton and about its restarts are appended. Lines of the gateway and of "
        "rollouts go to stderr.",
        show_default="stderr",
    ),
    as_json: bool = AS_JSON,
) -> None:
    """A bundle is the folder that the command 'gmmvit export' writes. A Triton model repository is the folder that the
    command 'gmmvit repository' writes. The command prints the addresses of the server when all models are ready. It
    restarts a server that has died, on the same ports. On SIGTERM and SIGINT, the server completes the requests in
    progress, and the command ends with status 0.
    """
    from gmmvit_deploy.serving.run import open_served, serve

    refusals, served = refusals_of(context), None
    leave_out = None if strict or state is not None else _left_out
    settings = _settings_from(context, refusals)
    missing = not paths and state is None
    refusals.refuse(missing, "expected a bundle or a repository to serve", hint="type gmmvit serve BUNDLE")
    with refusals.collected():
        if paths:
            served = open_served(paths, runner=runner, request_pixels=request_pixels, leave_out=leave_out)
    hint = "type the bundles of the repository, or remove --state"
    unfit = state is not None and isinstance(served, Path)
    refusals.refuse(unfit, f"{served}: --state needs bundles, got a repository", hint=hint)
    refusals.raise_all()
    from gmmvit_deploy.runtimes.engines.releases import triton_in_words
    from gmmvit_deploy.serving.front.options import CLASSIFY_PATH, DEFAULT_CLASSIFY_PORT
    from gmmvit_deploy.serving.server import ServerOptions
    from gmmvit_deploy.serving.server_log import stamped
    from gmmvit_deploy.serving.service import Service

    options = ServerOptions(start_timeout_s=start_timeout, log_path=log, **of_fields(ServerOptions, context.params))
    shown = ExitStack()

    def announce(service: Service) -> None:
        shown.close()
        server, images = service.server, {"classify": service.classify_url, "embed": service.embed_url}
        triton = None
        with suppress(ServerError):  # a server that has just died; the supervisor restarts it
            triton = server.version()
        networks = server.models.networks
        where = {
            "grpc": service.grpc_url,
            "http": service.http_url,
            "metrics": service.metrics_url,
            **images,
            "repository": str(server.repository),
            "triton": triton,
            "pid": server.pid,
            "gateway_pid": service.gateway.pid if service.gateway else None,
            "bundle": server.models.bundle or None,  # repositories of other tools state neither
            "runner": server.models.runner or None,
            "models": [{"name": each.name, "bundle": each.bundle, "runner": each.runner} for each in networks],
        }
        if as_json:
            print_json(where)
        else:
            ready = f"ready: {service.grpc_url}  {service.http_url}  metrics {service.metrics_url}"
            ready += "".join(f"  {name} {url}" for name, url in images.items() if url)
            if service.classify_url and not gateway:
                ready += f"  page {service.classify_url.removesuffix(CLASSIFY_PATH)}"
            typer.echo(ready + (f"  {server.models.runner}" if server.models.runner else ""))
            for each in networks if len(networks) > 1 else ():  # a line for each model
                offered = {output for output in each.outputs if each.takes_images}
                of_outputs = {"logits": service.classify_url, "features": service.embed_url}
                urls = [f"{url}/{each.name}" for output, url in of_outputs.items() if url and output in offered]
                typer.echo("  ".join([each.name, *urls, each.runner]))
        if triton is not None:
            note(triton_in_words(triton))

    with shown:
        how: dict[str, Any] = {
            "runner": runner,
            "request_pixels": request_pixels,
            "tritonserver": tritonserver,
            "on_log_line": note if log is None else None,
            "on_gateway_line": lambda line: note(stamped(line)),
            "on_ready": announce,
            "on_progress": shown.enter_context(progress("serve")),
        }
        if state is not None and settings is not None:
            from gmmvit_deploy.serving.rollout.run import serve_with_state

            given = served if isinstance(served, dict) else {}
            serve_with_state(given, state, options, settings, **how)
        elif served is not None:
            serve(
                served,
                options,
                classify_port=DEFAULT_CLASSIFY_PORT if classify_port is None else classify_port,
                gateway=settings,
                insecure=context.params["insecure"],
                leave_out=leave_out,
                on_note=note,
                **how,
            )


def _left_out(name: str, why: str) -> None:
    note(f"left out: {name}: {why}")


def _settings_from(context: typer.Context, refusals: Refusals) -> GatewaySettings | None:
    """Return the settings of the gateway, or None without one, and collect the options that do not go together."""
    given = context.params
    if not given["gateway"]:
        for name in typed(context, GATEWAY, "access_log"):
            hint = f"add --gateway, or remove {name}"
            refusals.refuse(name != "--insecure", f"{name} needs --gateway", hint=hint)
        with refusals.collected():
            require_insecure(given["host"], insecure=given["insecure"])
        return None
    hint = f"type --listen {given['host']} in place of --host"
    refusals.refuse(given["host"] != LOOPBACK, "--host and --gateway exclude each other", hint=hint)
    hint = "remove --classify-port: /classify is then on the port of --http-port"
    refusals.refuse(given["classify_port"] is not None, "--classify-port and --gateway exclude each other", hint=hint)
    settings = None
    with refusals.collected():
        settings = gateway_settings(given)
    return settings  # noqa: RET504  # None after an error
