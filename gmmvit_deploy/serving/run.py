"""Serve a bundle or a repository until SIGINT or SIGTERM, as ``gmmvit serve`` does."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from gmmvit_deploy.arguments import Refusals
from gmmvit_deploy.bundle.artifacts import MANIFEST_FILE, Bundle, open_bundle
from gmmvit_deploy.errors import BundleError, ServerError
from gmmvit_deploy.files.leftovers import temporary_folder
from gmmvit_deploy.progress import OnProgress, Progress, ignore, prefixed
from gmmvit_deploy.runtimes.programs.memory import release_memory
from gmmvit_deploy.serving.gateway.options import GatewaySettings, require_insecure
from gmmvit_deploy.serving.installs import ServerInstall, find_server
from gmmvit_deploy.serving.named_bundles import LeaveOut, named_paths, or_left_out
from gmmvit_deploy.serving.names import DEFAULT_REQUEST_PIXELS
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import Repository, add_to_repository
from gmmvit_deploy.serving.repository_runner import options_for_server
from gmmvit_deploy.serving.served_models import read_models
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from gmmvit_deploy.serving.service import Service


def open_served(
    arguments: Sequence[str],
    *,
    runner: str | None = None,
    request_pixels: int | None = None,
    leave_out: LeaveOut | None = None,
) -> dict[str, Bundle] | Path:
    """Open bundles, or check a repository and return its path.

    arguments: as for `named_paths`.
    leave_out: of several bundles, called for each that is broken; None makes it an error.
    Errors: those of `open_bundle` and `named_paths`.  InputError: ``runner`` or ``request_pixels`` is given for a
    repository, which already states both.
    """
    paths = named_paths(arguments)
    if len(paths) > 1:
        bundles = {}
        for name, path in paths.items():
            with or_left_out(name, leave_out if path.is_dir() else None):  # a mistake in a path is no broken bundle
                bundles[name] = open_bundle(path)
        if not bundles:
            raise BundleError("all bundles are broken", hint="type gmmvit export CHECKPOINT -o BUNDLE for each")
        return bundles
    ((name, path),) = paths.items()
    if (path / MANIFEST_FILE).is_file():
        return {name: open_bundle(path)}
    read_models(path)
    refusals = Refusals()
    refusals.refuse(
        request_pixels is not None,
        f"{path}: --request-pixels needs a bundle, got a repository, which already states the maximum",
        hint="remove --request-pixels, or type gmmvit repository BUNDLE --request-pixels N",
    )
    refusals.refuse(
        runner is not None,
        f"{path}: --runner needs a bundle, got a repository, which already states its runner",
        hint=f"remove --runner, or type gmmvit repository BUNDLE --runner {runner} for a new repository",
    )
    refusals.raise_all()
    return path


def serve(
    served: Mapping[str, Bundle] | Path,
    options: ServerOptions,
    *,
    runner: str | None = None,
    request_pixels: int | None = None,
    tritonserver: Path | None = None,
    classify_port: int | None = None,
    gateway: GatewaySettings | None = None,
    insecure: bool = False,
    leave_out: LeaveOut | None = None,
    on_note: Callable[[str], None] = lambda line: None,
    on_ready: Callable[[Service], None] = lambda service: None,
    on_log_line: Callable[[str], None] | None = None,
    on_gateway_line: Callable[[str], None] | None = None,
    on_progress: OnProgress = ignore,
) -> None:
    """Serve bundles by name, or a repository at a path, from the main thread until SIGINT or SIGTERM.

    A server that has died is restarted.

    Bundles are served from a temporary repository, which is written for the best backend of the server. A second
    signal kills the server at once, without a wait for requests in flight.
    options: with a gateway, their ports are those of the gateway, and the server listens on free ports of loopback.
    runner: ``NAME[:PRECISION]``; None takes the bundle's choice for this machine.
    request_pixels: the maximum number of pixels in the images of a request, for a bundle; None means
    `DEFAULT_REQUEST_PIXELS`.
    tritonserver: the path of the server program; None searches for an installed server.
    classify_port: the port on loopback for ``POST /classify`` without a gateway, 0 for a free port; None: not offered.
    gateway: settings of HAProxy in front of the server; None starts no gateway.
    insecure: True permits a server without a gateway on an address that other machines can reach.
    leave_out: of several bundles, called for each that this server cannot load; None makes it an error.
    on_note: called with each reason why a faster runner is not used.
    on_ready: called when every model is ready for the first time.
    on_log_line, on_gateway_line: called with each line of the log of the server and of the gateway.
    Errors: those of `TritonServer.start`, `Gateway`, `Gateway.start` and `repository_from_bundle`, and
        ServerError: ``tritonserver`` is not an executable file, there is no server for this machine or it cannot be
            downloaded, or the server was not ready after several restarts.
        InputError: the address is not loopback, without a gateway and without ``insecure``.
    """
    if gateway is None:
        require_insecure(options.host, insecure=insecure)
    service = Service(options, gateway, classify_port=classify_port, on_gateway_line=on_gateway_line)
    with service, temporary_folder("repository") as folder:
        if gateway is None:
            service.require_ports(takes_images=_takes_images(served))
        install = find_server(tritonserver, on_progress=on_progress)  # after the checks, because it may download it
        made = BundleServers(
            install, service.server_options, runner, request_pixels, on_note=on_note, on_log_line=on_log_line
        )
        if isinstance(served, Mapping):
            written = prefixed("repository", on_progress)
            server = made.make(served, folder, leave_out=leave_out, on_progress=written)
        else:
            server = TritonServer(served, install=install, options=service.server_options, on_log_line=on_log_line)
        with until_signal(service) as stopped:
            on_progress(Progress("start the server and load the models"))
            service.start(server, cancelled=stopped)
            if not stopped():
                on_ready(service)
            service.run(stopped)


@dataclass(frozen=True)
class BundleServers:
    """Makes servers for bundles.  runner, request_pixels, on_note, on_log_line: as for `serve`."""

    install: ServerInstall
    options: ServerOptions
    runner: str | None
    request_pixels: int | None
    on_note: Callable[[str], None]
    on_log_line: Callable[[str], None] | None

    def make(
        self,
        bundles: Mapping[str, Bundle],
        folder: Path,
        *,
        name: str = "",
        leave_out: LeaveOut | None = None,
        on_progress: OnProgress = ignore,
    ) -> TritonServer:
        """Write the repository of bundles below ``folder``, and return its server, which is not started.

        name: begins each line of the server's log.  leave_out: as for `serve`.
        Errors: those of `options_for_server` and `repository_from_bundle`.
        """
        pixels = DEFAULT_REQUEST_PIXELS if self.request_pixels is None else self.request_pixels
        repository, written = folder / "models", dict[str, Repository]()
        repository.mkdir()
        if len(bundles) == 1:
            leave_out = None
        asked = self.runner is not None or self.request_pixels is not None  # what does not go with it is a mistake
        for served, bundle in bundles.items():
            with or_left_out(served, None if asked else leave_out):
                options = RepositoryOptions(name=served, request_pixels=pixels)
                options, notes = options_for_server(bundle, options, self.install, self.runner)
                written[served] = add_to_repository(bundle, repository, options, on_progress=on_progress)
                for line in notes:
                    self.on_note(line if len(bundles) == 1 else f"{served}: {line}")
        if not written:
            raise ServerError("this server can load none of the bundles")
        release_memory()  # of the graphs that were read to choose runners: three times the weights of the largest

        def removed(failed: Mapping[str, str]) -> bool:
            broken = {served: failed.keys() & set(made.models) for served, made in written.items()}
            broken = {served: models for served, models in broken.items() if models}
            if leave_out is None or not broken or len(broken) == len(written):
                return False
            for served, models in broken.items():
                for model in written.pop(served).models:
                    shutil.rmtree(repository / model)
                leave_out(served, "; ".join(f"{model}: {failed[model]}" for model in sorted(models)))
            return True

        log = self.on_log_line
        if log is not None and name:
            log = _prefixed(log, name)
        return TritonServer(repository, install=self.install, options=self.options, on_log_line=log, removed=removed)


def _prefixed(log: Callable[[str], None], name: str) -> Callable[[str], None]:
    return lambda line: log(f"{name}: {line}")


def _takes_images(served: Mapping[str, Bundle] | Path) -> bool:
    if isinstance(served, Path):
        return bool(read_models(served).with_images())
    return any(bundle.manifest.image.normalisation is not None for bundle in served.values())


@contextmanager
def until_signal(service: Service) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGINT or SIGTERM came, and stop the service after the block.

    A second signal kills the service. An error after the first signal is left out.  Use it in the main thread.
    """
    seen = 0

    def count(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            service.kill_now()

    handlers = {number: signal.signal(number, count) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield lambda: seen > 0
    except BaseException:
        if not seen:
            raise
    finally:
        try:
            service.stop()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
