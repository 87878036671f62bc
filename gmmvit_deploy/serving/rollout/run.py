"""Run a service with a state folder until SIGINT or SIGTERM, as ``gmmvit serve --gateway --state DIR`` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.serving.gateway.options import GatewaySettings
from gmmvit_deploy.serving.installs import find_server
from gmmvit_deploy.serving.rollout._blue_green import BlueGreen
from gmmvit_deploy.serving.rollout._orders import Orders, first_bundles
from gmmvit_deploy.serving.rollout._state import State
from gmmvit_deploy.serving.run import BundleServers, until_signal
from gmmvit_deploy.serving.server import ServerOptions
from gmmvit_deploy.serving.service import Service


def serve_with_state(
    given: Mapping[str, Bundle],
    folder: Path,
    options: ServerOptions,
    settings: GatewaySettings,
    *,
    runner: str | None = None,
    request_pixels: int | None = None,
    tritonserver: Path | None = None,
    on_ready: Callable[[Service], None] = lambda service: None,
    on_log_line: Callable[[str], None] | None = None,
    on_gateway_line: Callable[[str], None] | None = None,
    on_progress: OnProgress = ignore,
) -> None:
    """Serve the bundles that were promoted last in a state folder, and carry out the orders of ``gmmvit rollout``.

    given: name of each model → its first bundle; empty for a folder in which bundles were promoted.
    folder: the state folder.
    The other arguments are those of `serving.run.serve`.
    Errors: those of `serving.run.serve` with a gateway, of `State.locked` and of `first_bundles`.
    """
    with ExitStack() as opened:
        state = opened.enter_context(State(folder).locked())
        bundles = first_bundles(state, given)
        service = opened.enter_context(Service(options, settings, on_gateway_line=on_gateway_line))
        install = find_server(tritonserver, on_progress=on_progress)  # after the checks, because it may download it
        servers = BundleServers(
            install, service.server_options, runner, request_pixels, on_note=service.note, on_log_line=on_log_line
        )
        replaced = BlueGreen(service, servers, bundles)
        orders = Orders(replaced, state, on_log_line=service.note)
        with until_signal(service) as stopped:
            on_progress(Progress("start the server and load the models"))
            replaced.start_first(cancelled=stopped, sources={"rollouts": orders.metrics_text})
            if stopped():
                return
            if not state.promoted():  # bundles that could not be served are not recorded
                state.promote(bundles)
            with orders:
                on_ready(service)
                service.run(stopped)
