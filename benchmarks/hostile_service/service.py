"""The service that hostile requests are sent to: ``gmmvit serve`` as a process of its own.

With a gateway, every request goes to the gateway's ports.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
import secrets
import signal
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from urllib.parse import urlsplit

from tests.hostile.commands import Sandbox
from tests.hostile.http_requests import CLASSIFY, GRPC_PORT, OWN_REGIONS
from tests.serving.commands import Serve, kinds_of, memory_mib

LIMIT_S = 40.0
"""The time limit of an answer."""

_AMONG_OTHERS = {"gmmvit": f"{CLASSIFY}/gmmvit", "hf-vit": f"{CLASSIFY}/hf-vit", "search": "/embed/search"}
"""The models of a service of several that get images → their paths for HTTP."""
_PR_SET_PDEATHSIG = 1
_USUAL_STACK_BYTES = 8 << 20
"""The stack of a thread that Linux gives by default."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where the regions of Triton's Python backend are


class Service:
    """A running ``gmmvit serve``.  Inside ``with Service(…) as service:`` the service answers."""

    def __init__(
        self,
        path: Path,
        sandbox: Sandbox,
        *,
        gateway: bool = False,
        protected: bool = True,
        options: tuple[str, ...] = (),
        beside: Mapping[str, Path] = MappingProxyType({}),
    ) -> None:
        """Describe the service.

        beside: name → bundle of each model that is served beside the bundle, which then has the name ``gmmvit``.
        protected: False limits the stacks of the server's threads to the 8 MiB that Linux gives by default.
        """
        self._paths = [f"{name}={each}" for name, each in {"gmmvit": path, **beside}.items()] if beside else [str(path)]
        self.asks = _AMONG_OTHERS if beside else {"gmmvit": CLASSIFY}
        """Each model that gets images → its path for HTTP."""
        self._sandbox = sandbox
        self._protected = protected
        self._options = options
        self.key = secrets.token_hex(16) if gateway else ""
        self.limit_s = LIMIT_S
        self._addresses: dict[str, tuple[str, int]] = {}

    def __enter__(self) -> Service:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        options = [*self._paths, *self._options, "--log", self._sandbox.root.with_name("server.log")]
        if self.key:
            keys = self._sandbox.root.with_name("keys")
            keys.write_text(f"hostile {self.key}\n")
            keys.chmod(0o600)
            options += ["--gateway", "--keys", keys]
        self._serve = Serve(
            None,
            *options,
            log=self._sandbox.root.with_name("serve.log"),
            cwd=self._sandbox.here,
            env=self._sandbox.environment(),
            preexec_fn=partial(_prepare, protected=self._protected),
        )
        where = self._serve.ready()
        for name in ("http", "grpc", "classify"):
            parts = urlsplit(where[name])
            self._addresses[name] = str(parts.hostname), int(parts.port or 0)
        folders = {path.name for path in self._sandbox.temporary.glob("gmmvit-run-serve-*")}
        regions = (path.name for path in _SHARED_MEMORY.iterdir())
        own = [name for name in regions if any(name.startswith(folder) for folder in folders)]
        OWN_REGIONS[:] = sorted(own, key=lambda name: (_SHARED_MEMORY / name).stat().st_mtime)

    def stop(self) -> None:
        self._serve.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._serve.process.wait(60)
        self._serve.kill()

    def restart(self) -> None:
        """Stop what is left of the service, and start the service again."""
        self.stop()
        self.start()

    def address(self, path: str) -> tuple[str, int]:
        """Return (host, port) that answers HTTP requests to a path."""
        if path == GRPC_PORT:
            return self._addresses["grpc"]
        return self._addresses["classify" if path.startswith(CLASSIFY) else "http"]

    @property
    def grpc_address(self) -> str:
        return "{}:{}".format(*self._addresses["grpc"])

    def headers(self, *, key: bool) -> bytes:
        """Return the headers of a client, with or without the key, as bytes of HTTP."""
        return f"Authorization: Bearer {self.key}\r\n".encode() if key and self.key else b""

    def metadata(self, *, key: bool) -> list[tuple[str, str]]:
        """Return the metadata of a gRPC client, with or without the key."""
        return [("authorization", f"Bearer {self.key}")] if key and self.key else []

    def servers(self) -> set[int]:
        """Return the PIDs that must not change: of Triton, its workers, the gateway and the front.

        A process that decodes large images ends when it is idle.
        """
        kinds = kinds_of(self._serve.process.pid)
        return {pid for pid, kind in kinds.items() if kind not in ("gmmvit serve", "large images", "")}

    def memory_mb(self) -> dict[str, int]:
        """Return name → memory of the service's processes without mapped files, in MiB; workers have one name."""
        memory: dict[str, float] = {}
        for pid, kind in kinds_of(self._serve.process.pid).items():
            with contextlib.suppress(OSError):  # the process ended meanwhile
                name = "workers" if kind.startswith("worker") else kind
                memory[name] = memory.get(name, 0) + memory_mib(pid)
        return {name: round(size) for name, size in sorted(memory.items())}


def _prepare(*, protected: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if not protected:
        resource.setrlimit(resource.RLIMIT_STACK, (_USUAL_STACK_BYTES, _USUAL_STACK_BYTES))
