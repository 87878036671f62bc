"""Serve a bundle or a repository until SIGINT or SIGTERM, as ``gmmvit serve`` does."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from gmmvit_deploy.bundle.artifacts import MANIFEST_FILE, Bundle, open_bundle
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.files.leftovers import temporary_folder
from gmmvit_deploy.progress import OnProgress, Progress, ignore, prefixed
from gmmvit_deploy.serving.chosen import options_for_server
from gmmvit_deploy.serving.gateway.options import GatewaySettings, require_insecure
from gmmvit_deploy.serving.installs import find_server
from gmmvit_deploy.serving.names import DEFAULT_REQUEST_PIXELS
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.served_models import read_models
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from gmmvit_deploy.serving.service import Service


def serve_path(
    path: Path,
    options: ServerOptions,
    *,
    runner: str | None = None,
    request_pixels: int | None = None,
    tritonserver: Path | None = None,
    classify_port: int | None = None,
    gateway: GatewaySettings | None = None,
    insecure: bool = False,
    on_note: Callable[[str], None] = lambda line: None,
    on_ready: Callable[[Service], None] = lambda service: None,
    on_log_line: Callable[[str], None] | None = None,
    on_gateway_line: Callable[[str], None] | None = None,
    on_progress: OnProgress = ignore,
) -> None:
    """Serve a bundle or a repository from the main thread until SIGINT or SIGTERM, and restart a server that has died.

    A bundle is served from a temporary repository, which is written for the best backend of the server.
    options: the ports, timeouts and log of the server.
    runner: the runner of the network, ``NAME[:PRECISION]``; None takes the bundle's choice for this machine.
    request_pixels: the maximum number of pixels in the images of a request, for the temporary repository; None means
    `DEFAULT_REQUEST_PIXELS`.
    tritonserver: the path of the server program; None searches for an installed server.
    classify_port: the port on loopback for ``POST /classify`` without a gateway, 0 for a free port; None: not offered.
    gateway: settings of HAProxy in front of the server; None starts no gateway. With a gateway, ``options`` gives the
    ports of the gateway, and the server listens on free ports of loopback.
    insecure: True permits a server without a gateway on an address that other machines can reach.
    on_note: called with each reason why a faster runner is not used.
    on_ready: called with the addresses when every model is ready for the first time.
    on_log_line: called with each line of the server's log.
    on_gateway_line: called with each line of the gateway's log; the access log is not part of it.
    on_progress: called with each step until every model is ready.
    A second SIGINT or SIGTERM kills the server at once, without a wait for requests in flight.
    Errors: those of `TritonServer.start`, `Gateway`, `Gateway.start`, `open_bundle` and `repository_from_bundle`, and
        ServerError: ``tritonserver`` is not an executable file, there is no server for this machine or it cannot be
            downloaded, or the server was not ready after several restarts.
        InputError: the address is not loopback, without a gateway and without ``insecure``.
        InputError: ``runner`` or ``request_pixels`` is given for a repository, which already states both.
    """
    if gateway is None:
        require_insecure(options.host, insecure=insecure)
    bundle = _bundle_of(path, runner=runner, request_pixels=request_pixels)
    service = Service(options, gateway, classify_port=classify_port, on_gateway_line=on_gateway_line)
    with service, temporary_folder("repository") as folder:
        install = find_server(tritonserver, on_progress=on_progress)  # after the checks, because it may download it
        repository = path
        if bundle is not None:
            written = repository_options(request_pixels)
            chosen, notes = options_for_server(bundle, written, install, runner)
            progress = prefixed("repository", on_progress)
            repository = repository_from_bundle(bundle, folder / "models", chosen, on_progress=progress).path
            for line in notes:
                on_note(line)
        server = TritonServer(repository, install=install, options=service.server_options, on_log_line=on_log_line)
        with Signals(on_second=service.kill_now) as signals:
            try:
                on_progress(Progress("start the server and load the models"))
                service.start(server, cancelled=signals.any_seen)
                if not signals.any_seen():
                    on_ready(service)
                service.run(signals.any_seen)
            except BaseException:
                if not signals.seen:
                    raise
            finally:
                service.stop()


def repository_options(request_pixels: int | None) -> RepositoryOptions:
    """Return the options of a temporary repository, which leave the runner open.  None: the default."""
    return RepositoryOptions(request_pixels=DEFAULT_REQUEST_PIXELS if request_pixels is None else request_pixels)


def _bundle_of(path: Path, *, runner: str | None, request_pixels: int | None) -> Bundle | None:
    """Open the bundle at ``path``; return None for a repository.

    Errors: those of `open_bundle` and `read_models`, and InputError for an option that a repository does not take.
    """
    if (path / MANIFEST_FILE).is_file():
        return open_bundle(path)
    read_models(path)
    if request_pixels is not None:
        raise InputError(
            f"{path}: --request-pixels needs a bundle, got a repository, which already states the maximum",
            hint="remove --request-pixels, or type gmmvit repository BUNDLE --request-pixels N",
        )
    if runner is not None:
        raise InputError(
            f"{path}: --runner needs a bundle, got a repository, which already states its runner",
            hint=f"remove --runner, or type gmmvit repository BUNDLE --runner {runner} for a new repository",
        )
    return None


class Signals:
    """Counts SIGINT and SIGTERM inside ``with Signals(on_second=…) as signals:``; use it in the main thread.

    on_second: called by the signal handler at the second signal and each further signal.
    """

    def __init__(self, *, on_second: Callable[[], None]) -> None:
        self.seen = 0
        self._on_second = on_second
        self._before: dict[signal.Signals, object] = {}

    def any_seen(self) -> bool:
        return self.seen > 0

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._count)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # the handler that signal() returned

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.seen += 1
        if self.seen > 1:
            self._on_second()
