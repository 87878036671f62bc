"""The service that hostile requests are sent to: ``gmmvit serve`` as a process of its own.

Without a gateway, the front is started too, and requests of the front get the secret of the gateway. With a gateway,
every request goes to the gateway's ports.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from urllib.parse import urlsplit

from gmmvit_deploy.serving.front.options import FRONT_HEADER, FrontOptions
from gmmvit_deploy.serving.front.process import FrontProcess
from gmmvit_deploy.serving.ports import free_ports
from tests.hostile.commands import Sandbox
from tests.hostile.http_requests import CLASSIFY, GRPC_PORT, OWN_REGIONS

LIMIT_S = 40.0
"""The time limit of an answer."""

_AMONG_OTHERS = {"gmmvit": f"{CLASSIFY}/gmmvit", "hf-vit": f"{CLASSIFY}/hf-vit", "search": "/embed/search"}
"""The models of a service of several that get images → their paths for HTTP."""
_PR_SET_PDEATHSIG = 1
_USUAL_STACK_BYTES = 8 << 20
"""The stack of a thread that Linux gives by default."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where the regions of Triton's Python backend are
_ROLES = {
    "triton_python_backend_stub": "Triton's workers",
    "tritonserver": "Triton",
    "haproxy": "gateway",
    "serving.front": "front",
    "gmmvit_cli": "gmmvit serve",
}
"""Part of a command line → name of the process."""


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
        self._gateway = gateway
        self._protected = protected
        self._options = options
        self._ports = free_ports(dict.fromkeys(("HTTP", "gRPC", "metrics"), ("127.0.0.1", 0)))
        self._secret = secrets.token_hex(16)
        self.key = secrets.token_hex(16) if gateway else ""
        self.limit_s = LIMIT_S
        self._command: subprocess.Popen[str] | None = None
        self._front: FrontProcess | None = None
        self._addresses: dict[str, tuple[str, int]] = {}

    def __enter__(self) -> Service:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        http, grpc, metrics = map(str, self._ports)
        ports = ["--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics]
        command = [sys.executable, "-m", "gmmvit_cli.main", "serve", *self._paths, "--json", *ports, *self._options]
        command += [] if self._gateway else ["--classify-port", "0"]
        command += ["--log", str(self._sandbox.root.with_name("server.log"))]
        if self._gateway:
            keys = self._sandbox.root.with_name("keys")
            keys.write_text(f"hostile {self.key}\n")
            keys.chmod(0o600)
            command += ["--gateway", "--keys", str(keys)]
        self._command = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=self._sandbox.root.with_name("serve.log").open("a"),
            text=True,
            cwd=self._sandbox.here,
            env=self._sandbox.environment(),
            preexec_fn=partial(_prepare, protected=self._protected),
        )
        where = self._printed()
        for protocol in ("http", "grpc"):
            parts = urlsplit(where[protocol])
            self._addresses[protocol] = str(parts.hostname), int(parts.port or 0)
        folders = {path.name for path in self._sandbox.temporary.glob("gmmvit-run-serve-*")}
        regions = (path.name for path in _SHARED_MEMORY.iterdir())
        own = [name for name in regions if any(name.startswith(folder) for folder in folders)]
        OWN_REGIONS[:] = sorted(own, key=lambda name: (_SHARED_MEMORY / name).stat().st_mtime)
        if not self._gateway and self._front is None:
            self._front = FrontProcess(
                FrontOptions(triton_url="http://{}:{}".format(*self._addresses["http"])), self._secret
            )
            self._front.wait_ready()

    def _printed(self) -> dict[str, str]:
        lines: list[str] = []
        for line in (self._command.stdout if self._command else None) or ():
            lines.append(line)
            if line.startswith("}"):
                return dict(json.loads("".join(lines)))
        raise SystemExit(f"gmmvit serve did not start; see {self._sandbox.root.with_name('serve.log')}")

    def stop(self) -> None:
        if self._front is not None:
            self._front.stop()
            self._front = None
        if self._command is None:
            return
        self._command.send_signal(signal.SIGTERM)
        try:
            self._command.wait(60)
        except subprocess.TimeoutExpired:
            self._command.kill()
            self._command.wait()
        if self._command.stdout is not None:
            self._command.stdout.close()
        self._command = None

    def restart(self) -> None:
        """Stop what is left of the service, and start the service again."""
        self.stop()
        self.start()

    def address(self, path: str) -> tuple[str, int]:
        """Return (host, port) that answers HTTP requests to a path."""
        if self._front is not None and path.startswith(CLASSIFY):
            return "127.0.0.1", self._front.port
        return self._addresses["grpc" if path == GRPC_PORT else "http"]

    @property
    def grpc_address(self) -> str:
        return "{}:{}".format(*self._addresses["grpc"])

    def headers(self, path: str, *, key: bool) -> bytes:
        """Return the headers of a client, with or without the key, as bytes of HTTP."""
        headers = b""
        if key and self.key:
            headers += f"Authorization: Bearer {self.key}\r\n".encode()
        if self._front is not None and path.startswith(CLASSIFY):
            headers += f"{FRONT_HEADER}: {self._secret}\r\n".encode()
        return headers

    def metadata(self, *, key: bool) -> list[tuple[str, str]]:
        """Return the metadata of a gRPC client, with or without the key."""
        return [("authorization", f"Bearer {self.key}")] if key and self.key else []

    def processes(self) -> dict[int, str]:
        """Return PID → command line of the service's processes."""
        children: dict[int, list[int]] = {}
        commands: dict[int, str] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # the process ended meanwhile
            if state != "Z":
                commands[int(folder.name)] = command
                children.setdefault(int(parent), []).append(int(folder.name))
        waiting = [self._command.pid] if self._command is not None else []
        waiting += [self._front.pid] if self._front is not None else []
        ours: dict[int, str] = {}
        while waiting:
            pid = waiting.pop()
            if pid in commands:
                ours[pid] = commands[pid]
            waiting += children.get(pid, [])
        return ours

    def servers(self) -> set[int]:
        """Return the PIDs that must not change: of Triton, its workers, the gateway and the front.

        A process that decodes large images ends when it is idle.
        """
        own = self._command.pid if self._command is not None else 0
        processes = self.processes().items()
        return {pid for pid, command in processes if pid != own and command and "large_images" not in command}

    def memory_mb(self) -> dict[str, int]:
        """Return name → resident memory of the service's processes, without shared pages, in MB."""
        memory: dict[str, int] = {}
        for pid, command in self.processes().items():
            try:
                fields = Path(f"/proc/{pid}/statm").read_text().split()
            except OSError:
                continue  # the process ended meanwhile
            name = next((role for part, role in _ROLES.items() if part in command), "others")
            memory[name] = memory.get(name, 0) + (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
        return {name: size >> 20 for name, size in sorted(memory.items())}


def _prepare(*, protected: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if not protected:
        resource.setrlimit(resource.RLIMIT_STACK, (_USUAL_STACK_BYTES, _USUAL_STACK_BYTES))
