"""One server and one service with a gateway for all processes of a test run.

The first process that asks starts ``python -m tests.serving.shared KIND BUNDLE FOLDER RUN``. It serves until
process RUN, the main process of pytest, has ended.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from gmmvit_deploy.bundle.artifacts import open_bundle
from gmmvit_deploy.serving.gateway.gateway import Gateway, behind_gateway
from gmmvit_deploy.serving.gateway.options import GatewaySettings
from gmmvit_deploy.serving.processes import Worker, workers_of
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.served_models import ServedModels, read_models
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.serving.gateways import FREE_PORTS as FREE_PORTS
from tests.serving.gateways import key_file
from tests.waiting import wait_until

Kind = Literal["bare", "gateway"]
SECRET = "0123456789abcdef"  # noqa: S105 - of the tests
MAX_BODY_BYTES = 4_000_000


@dataclass(frozen=True, kw_only=True)
class Running:
    """A server of another process, or the gateway before it, with the addresses of a `TritonServer`."""

    pid: int
    http_url: str
    grpc_url: str
    metrics_url: str
    http_port: int
    grpc_port: int
    metrics_port: int
    repository: Path

    @property
    def options(self) -> ServerOptions:
        return ServerOptions(http_port=self.http_port, grpc_port=self.grpc_port, metrics_port=self.metrics_port)

    @cached_property
    def models(self) -> ServedModels:
        return read_models(self.repository)

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(workers_of(self.pid))


def shared_service(kind: Kind, bundle: Path, folder: Path) -> dict[str, Running]:
    """Start the service of this test run unless it runs, and return its ``server``, and its ``gateway`` if it has one.

    kind: ``bare`` is Triton alone; ``gateway`` is Triton behind HAProxy, with a secret for Triton's administration.
    folder: the folder that all processes of the run share.
    """
    own = folder / f"service-{kind}"
    with (folder / f"service-{kind}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        where = own / "where.json"
        if not where.exists():
            own.mkdir(exist_ok=True)
            run = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
            command = [sys.executable, "-m", "tests.serving.shared", kind, str(bundle), str(own), str(run)]
            with (own / "log.txt").open("w") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            wait_until(lambda: where.exists() or process.poll() is not None, f"the shared {kind} service", within_s=180)
            assert where.exists(), (own / "log.txt").read_text()
    parts = json.loads(where.read_text())
    return {name: Running(**{**part, "repository": Path(part["repository"])}) for name, part in parts.items()}


@contextmanager
def _opened(kind: Kind, repository: Path, folder: Path) -> Iterator[tuple[TritonServer, Gateway | None]]:
    free = ServerOptions(**FREE_PORTS)
    options = free if kind == "bare" else behind_gateway(free, SECRET)
    with TritonServer(repository, options=options) as server:
        if kind == "bare":
            yield server, None
            return
        gateway = Gateway(GatewaySettings(keys=key_file(folder), max_body_bytes=MAX_BODY_BYTES), **FREE_PORTS)
        gateway.admin_secret = SECRET
        try:
            gateway.start(server)
            yield server, gateway
        finally:
            gateway.stop()


def _described(part: Any, repository: Path) -> Running:
    fields = ("pid", "http_url", "grpc_url", "metrics_url", "http_port", "grpc_port", "metrics_port")
    return Running(**{name: getattr(part, name) for name in fields}, repository=repository)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main(kind: Kind, bundle: Path, folder: Path, run: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    repository = repository_from_bundle(open_bundle(bundle), folder / "models").path
    with _opened(kind, repository, folder) as (server, gateway):
        parts = {"server": server} if gateway is None else {"server": server, "gateway": gateway}
        where = {name: asdict(_described(part, repository)) for name, part in parts.items()}
        written = folder / "where.partial"
        written.write_text(json.dumps(where, default=str))
        written.rename(folder / "where.json")
        while _alive(run):
            if gateway is not None:
                gateway.step()
            time.sleep(0.2)


if __name__ == "__main__":
    kind, bundle, folder, run = sys.argv[1:]
    main("bare" if kind == "bare" else "gateway", Path(bundle), Path(folder), int(run))
