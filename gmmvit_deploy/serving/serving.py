"""Serve a bundle or a repository until SIGINT or SIGTERM, as ``gmmvit serve`` does."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from gmmvit_deploy.artifacts import MANIFEST_FILE, open_bundle
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.leftovers import temporary_folder
from gmmvit_deploy.progress import OnProgress, Progress, ignore, prefixed
from gmmvit_deploy.serving.installs import find_server
from gmmvit_deploy.serving.model_configs import CpuKernels, RepositoryOptions
from gmmvit_deploy.serving.names import DEFAULT_REQUEST_PIXELS
from gmmvit_deploy.serving.repository import CpuKernelsUse, repository_from_bundle, stated_cpu_kernels
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from gmmvit_deploy.serving.supervisor import Supervisor
from gmmvit_deploy.serving.supervisor_metrics import MetricsEndpoint

__all__ = ["Service", "serve_path"]

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What ``gmmvit serve`` runs.

    server: the server. Its process ID changes with a restart, and its ports do not.
    metrics_url: the address of the metrics of the server and of the supervisor.
    """

    server: TritonServer
    metrics_url: str


def serve_path(
    path: Path,
    options: ServerOptions,
    *,
    cpu_kernels: CpuKernels | None = None,
    request_pixels: int | None = None,
    tritonserver: Path | None = None,
    on_kernels: Callable[[CpuKernelsUse], None] = lambda use: None,
    on_ready: Callable[[Service], None] = lambda service: None,
    on_log_line: Callable[[str], None] | None = None,
    on_progress: OnProgress = ignore,
) -> None:
    """Serve a bundle or a repository from the main thread until SIGINT or SIGTERM, and restart a server that has died.

    A bundle is served from a temporary repository, which is written for the best backend of the server.
    options: the ports, timeouts and log of the server.
    cpu_kernels: states whether the temporary repository uses this project's CPU kernels; None means ``auto``.
    request_pixels: the maximum number of pixels in the images of a request, for the temporary repository; None means
    `DEFAULT_REQUEST_PIXELS`.
    tritonserver: the path of the server program; None searches for an installed server.
    on_kernels: called with a `CpuKernelsUse`, which states whether the network uses this project's CPU kernels.
    on_ready: called with the addresses when every model is ready for the first time.
    on_log_line: called with each line of the server's log.
    on_progress: called with each step until every model is ready.
    A second SIGINT or SIGTERM kills the server at once, without a wait for requests in flight.
    Errors: those of `TritonServer.start`, `open_bundle` and `repository_from_bundle`, and
        MissingDependencyError: no server is installed.
        ServerError: ``tritonserver`` is not an executable file, or the server was not ready after several restarts.
        InputError: ``cpu_kernels`` or ``request_pixels`` is given for a repository, which already states both.
    """
    install = find_server(tritonserver)
    with temporary_folder("repository") as folder:
        repository = path
        if (path / MANIFEST_FILE).is_file():
            written = RepositoryOptions(
                backend=install.best_backend,
                cpu_kernels=cpu_kernels or "auto",
                request_pixels=DEFAULT_REQUEST_PIXELS if request_pixels is None else request_pixels,
            )
            made = repository_from_bundle(
                open_bundle(path), folder / "models", written, on_progress=prefixed("repository", on_progress)
            )
            repository = made.path
            on_kernels(made.cpu_kernels)
        elif request_pixels is not None:
            raise InputError(
                f"{path}: --request-pixels needs a bundle, got a repository, which already states the maximum",
                hint="remove --request-pixels, or type gmmvit repository BUNDLE --request-pixels N",
            )
        elif cpu_kernels is not None:
            raise InputError(
                f"{path}: --cpu-kernels needs a bundle, got a repository, which already states whether to use kernels",
                hint="remove --cpu-kernels, or type gmmvit repository BUNDLE --cpu-kernels auto for a new repository",
            )
        else:
            stated = stated_cpu_kernels(path)
            if stated is not None:
                on_kernels(stated)
        # The supervisor answers on the metrics port, also while the server restarts.
        own = replace(options, metrics_host=_LOOPBACK, metrics_port=0)
        server = TritonServer(repository, install=install, options=own, on_log_line=on_log_line)
        supervisor = Supervisor(server)
        signals = _Signals(server)
        endpoint = MetricsEndpoint(options.host, options.metrics_port, supervisor.metrics_text)
        with signals, closing(endpoint):
            try:
                on_progress(Progress("start the server and load the models"))
                server.start(cancelled=signals.any_seen)
                if not signals.any_seen():
                    on_ready(Service(server=server, metrics_url=endpoint.url))
                supervisor.run(signals.any_seen)
            except BaseException:
                if not signals.seen:
                    raise
            finally:
                server.stop()


class _Signals:
    """Counts SIGINT and SIGTERM; the second signal kills the server."""

    def __init__(self, server: TritonServer) -> None:
        self.seen = 0
        self._server = server
        self._before: dict[signal.Signals, object] = {}

    def any_seen(self) -> bool:
        return self.seen > 0

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._count)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # the handler that signal() returned

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.seen += 1
        if self.seen > 1:
            self._server.kill_now()
