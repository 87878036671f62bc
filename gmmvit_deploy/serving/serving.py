"""Serve a bundle or a repository until SIGINT or SIGTERM, as ``gmmvit serve`` does."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from gmmvit_deploy.artifacts import MANIFEST_FILE, open_bundle
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.progress import OnProgress, Progress, ignore, prefixed
from gmmvit_deploy.serving.gateway.options import GatewaySettings, require_insecure
from gmmvit_deploy.serving.gateway.service import Gateway, behind_gateway
from gmmvit_deploy.serving.installs import find_server
from gmmvit_deploy.serving.model_configs import CpuKernels, RepositoryOptions
from gmmvit_deploy.serving.repository import CpuKernelsUse, repository_from_bundle, stated_cpu_kernels
from gmmvit_deploy.serving.server import ServerOptions, TritonServer

__all__ = ["serve_path"]


def serve_path(
    path: Path,
    options: ServerOptions,
    *,
    cpu_kernels: CpuKernels | None = None,
    tritonserver: Path | None = None,
    gateway: GatewaySettings | None = None,
    insecure: bool = False,
    on_kernels: Callable[[CpuKernelsUse], None] = lambda use: None,
    on_ready: Callable[[TritonServer, Gateway | None], None] = lambda server, gateway: None,
    on_log_line: Callable[[str], None] | None = None,
    on_gateway_line: Callable[[str], None] | None = None,
    on_progress: OnProgress = ignore,
) -> None:
    """Serve a bundle or a repository from the main thread until SIGINT or SIGTERM.

    A bundle is served from a temporary repository, which is written for the best backend of the server.
    options: the ports, timeouts and log of the server.
    cpu_kernels: states whether the temporary repository uses this project's CPU kernels; None means ``auto``.
    tritonserver: the path of the server program; None searches for an installed server.
    gateway: settings of HAProxy in front of the server; None starts no gateway. With a gateway, ``options`` gives the
    ports of the gateway, and the server listens on free ports of loopback.
    insecure: True permits a server without a gateway on an address that other machines can reach.
    on_kernels: called with a `CpuKernelsUse`, which states whether the network uses this project's CPU kernels.
    on_ready: called with the server, and with the gateway or None, when every model is ready.
    on_log_line: called with each line of the server's log.
    on_gateway_line: called with each line of the gateway's log; the access log is not part of it.
    on_progress: called with each step until every model is ready.
    A second SIGINT or SIGTERM kills the server at once, without a wait for requests in flight.
    Errors: those of `TritonServer.start`, `Gateway`, `Gateway.start`, `open_bundle` and `repository_from_bundle`, and
        MissingDependencyError: no server is installed.
        ServerError: ``tritonserver`` is not an executable file, or the server ends before a signal.
        InputError: the address is not loopback, without a gateway and without ``insecure``.
        InputError: ``cpu_kernels`` is given for a repository, which was already written with or without the kernels.
    """
    install = find_server(tritonserver)
    with ExitStack() as stack:
        opened: Gateway | None = None
        if gateway is None:
            require_insecure(options.host, insecure=insecure)
        else:
            opened = Gateway(
                gateway,
                http_port=options.http_port,
                grpc_port=options.grpc_port,
                metrics_port=options.metrics_port,
                on_log_line=on_gateway_line,
            )
            stack.callback(opened.stop)
            options = behind_gateway(options, opened.admin_secret)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gmmvit-repository-"))
        repository = path
        if (path / MANIFEST_FILE).is_file():
            written = RepositoryOptions(backend=install.best_backend, cpu_kernels=cpu_kernels or "auto")
            made = repository_from_bundle(
                open_bundle(path), Path(folder) / "models", written, on_progress=prefixed("repository", on_progress)
            )
            repository = made.path
            on_kernels(made.cpu_kernels)
        elif cpu_kernels is not None:
            raise InputError(
                f"{path}: --cpu-kernels needs a bundle, got a repository, which already states whether to use kernels",
                hint="remove --cpu-kernels, or type gmmvit repository BUNDLE --cpu-kernels auto for a new repository",
            )
        else:
            stated = stated_cpu_kernels(path)
            if stated is not None:
                on_kernels(stated)
        server = TritonServer(repository, install=install, options=options, on_log_line=on_log_line)
        signals = _Signals(server, opened)
        with signals:
            try:
                on_progress(Progress("start the server and load the models"))
                server.start(cancelled=signals.any_seen)
                if opened is not None and not signals.any_seen():
                    on_progress(Progress("start the gateway"))
                    opened.start(server)
                if not signals.any_seen():
                    on_ready(server, opened)
                server.wait(poll=lambda: signals.any_seen() or (opened is not None and opened.step()))
            except BaseException:
                if not signals.seen:
                    raise
            finally:
                if opened is not None:
                    opened.stop()  # first, so that requests in progress reach the server
                server.stop()


class _Signals:
    """Counts SIGINT and SIGTERM; the second signal kills the server and the gateway."""

    def __init__(self, server: TritonServer, gateway: Gateway | None) -> None:
        self.seen = 0
        self._server, self._gateway = server, gateway
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
            if self._gateway is not None:
                self._gateway.kill_now()
