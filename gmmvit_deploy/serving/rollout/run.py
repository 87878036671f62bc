"""Run a service with a state folder until SIGINT or SIGTERM, as ``gmmvit serve --gateway --state DIR`` does."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from gmmvit_deploy.bundle.artifacts import open_bundle
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.serving.gateway.options import GatewaySettings
from gmmvit_deploy.serving.gateway.service import Gateway, behind_gateway
from gmmvit_deploy.serving.installs import find_server
from gmmvit_deploy.serving.rollout._replicas import Replicas
from gmmvit_deploy.serving.rollout._service import Rollouts, first_bundle
from gmmvit_deploy.serving.rollout._state import State
from gmmvit_deploy.serving.run import Signals, repository_options
from gmmvit_deploy.serving.server import ServerOptions
from gmmvit_deploy.serving.service import metric_sources

_POLL_S = 0.05


def serve_with_state(
    path: Path | None,
    folder: Path,
    options: ServerOptions,
    settings: GatewaySettings,
    *,
    runner: str | None = None,
    request_pixels: int | None = None,
    tritonserver: Path | None = None,
    on_ready: Callable[[Gateway, Replicas], None] = lambda gateway, replicas: None,
    on_log_line: Callable[[str], None] | None = None,
    on_gateway_line: Callable[[str], None] | None = None,
    on_progress: OnProgress = ignore,
) -> None:
    """Serve the bundle that was promoted last in a state folder, and carry out the orders of ``gmmvit rollout``.

    path: the first bundle; None for a folder in which a bundle was promoted.  folder: the state folder.
    options, settings, runner, request_pixels, tritonserver: as for `serving.run.serve_path`.
    on_ready: called when the service is ready.
    Errors: those of `serving.run.serve_path` with a gateway, of `State.locked` and of `first_bundle`.
    """
    note = on_gateway_line or (lambda line: None)
    given = None if path is None else open_bundle(path)
    with ExitStack() as opened:
        state = opened.enter_context(State(folder).locked())
        bundle = first_bundle(state, given)
        gateway = Gateway(
            settings,
            http_port=options.http_port,
            grpc_port=options.grpc_port,
            metrics_port=options.metrics_port,
            on_log_line=on_gateway_line,
        )
        opened.callback(gateway.stop)
        install = find_server(tritonserver, on_progress=on_progress)  # after the checks, because it may download it
        behind = behind_gateway(options, gateway.admin_secret)
        written = repository_options(request_pixels)
        replicas = Replicas(gateway, install, behind, written, runner=runner, note=note, on_log_line=on_log_line)
        opened.callback(replicas.stop)  # after the gateway, so that requests in progress reach front and server

        def kill_now() -> None:
            gateway.kill_now()
            replicas.kill_now()

        signals = opened.enter_context(Signals(on_second=kill_now))
        on_progress(Progress("start the server and load the models"))
        replicas.start_first(bundle, cancelled=signals.any_seen)
        if signals.any_seen():
            return
        on_progress(Progress("start the gateway"))
        rollouts = Rollouts(replicas, state, on_log_line=note)
        sources = {"server": replicas.metrics_text, "rollouts": rollouts.metrics_text, **metric_sources(gateway)}
        opened.callback(gateway.stop)
        gateway.start(replicas.server, front=replicas.front, sources=sources, rollouts=True)
        opened.enter_context(rollouts)
        on_ready(gateway, replicas)
        while not signals.any_seen():
            replicas.step(signals.any_seen)
            gateway.step()
            time.sleep(_POLL_S)
