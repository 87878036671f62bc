"""Run HAProxy in front of a Triton server: start, reload of keys and certificate, restart, access log, stop."""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from gmmvit_deploy.errors import GmmvitError, OutputError, ServerError
from gmmvit_deploy.files.leftovers import new_run_folder, remove_run_folder
from gmmvit_deploy.inference.cores import cores
from gmmvit_deploy.serving._local_http import MetricsEndpoint, text_from_socket, text_from_url
from gmmvit_deploy.serving._metric_text import joined_metrics, metric_text
from gmmvit_deploy.serving.gateway._keys import Client, map_of_keys, map_text, read_keys, readable_by_others
from gmmvit_deploy.serving.gateway.files import expiry_of, gateway_options, options_for, tls_pem, write_files
from gmmvit_deploy.serving.gateway.haproxy import HAProxy, find_haproxy
from gmmvit_deploy.serving.gateway.options import Front, GatewayOptions, GatewaySettings
from gmmvit_deploy.serving.gateway.upstreams import Upstreams, first_upstreams
from gmmvit_deploy.serving.ports import listening_sockets
from gmmvit_deploy.serving.processes import Restarts
from gmmvit_deploy.serving.served_models import ServedModels
from gmmvit_deploy.serving.server import ADMIN_HEADER, ServerOptions, TritonServer

_EXPORTER_PATH = "/metrics?scope=frontend&scope=backend&scope=server"
_QUANTILES = "0.5:0.05,0.9:0.01,0.99:0.001"
_LOOPBACK = "127.0.0.1"
_LOOK_S = 0.5  # the time between two looks at the key file and the certificate
_STOP_S = 20.0
_PIPE_BYTES = 1 << 20  # the maximum for users without privileges; about 2,500 lines
_READ_BYTES = 1 << 16
_PAUSE_S = 0.02
"""The time between two reads of the log: a wake-up for many lines instead of a wake-up for each line."""


def behind_gateway(options: ServerOptions, secret: str) -> ServerOptions:
    """Return the options of a server behind a gateway: free ports on loopback, and admin interfaces with a secret.

    The gateway passes on no request to the admin interfaces except statistics, to which it adds the secret.
    """
    return replace(
        options,
        host="127.0.0.1",
        metrics_host=None,
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        admin_secret=secret,
        extra_arguments=(
            *options.extra_arguments,
            "--metrics-config=summary_latencies=true",
            f"--metrics-config=summary_quantiles={_QUANTILES}",
        ),
    )


_LINES_OF_A_COMMAND = 100
"""HAProxy takes no command that is larger than its buffer, and says nothing then."""


class Gateway:
    """HAProxy in front of a server.  `serving.service.Service` runs both.

    Create, start, step and stop it in the same thread. Each thread that calls `start`, `step` or `serve` must live as
    long as the gateway, because Linux ends a HAProxy with the thread that started it.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        http_port: int = 8000,
        grpc_port: int = 8001,
        metrics_port: int = 8002,
        on_log_line: Callable[[str], None] | None = None,
    ) -> None:
        """Check keys and certificate, and open the ports on ``settings.listen``; 0 means any free port.

        Errors: InputError for an invalid key file or certificate. ServerError when HAProxy is not installed or a port
        cannot be opened. OutputError when the access log cannot be opened.
        """
        self.settings = settings
        self.admin_secret, self.front_secret = secrets.token_hex(16), secrets.token_hex(16)
        self.key_reloads = 0
        self._restarts = Restarts("HAProxy")
        self.reload_failed = False
        self._note = on_log_line or (lambda line: None)
        self._program = find_haproxy()
        self._keys = read_keys(settings.keys)
        self._pem = tls_pem(settings)
        if readable_by_others(settings.keys):
            self._note(f"gateway: other users of this machine can read {settings.keys}; type chmod 600 {settings.keys}")
        # HAProxy inherits the sockets: a port is not lost between the choice of a free port and the start of HAProxy,
        # and connections wait while a HAProxy that has ended is started again.
        ports = {"HTTP": http_port, "gRPC": grpc_port, "metrics": metrics_port}
        services = {name: (settings.listen, port) for name, port in ports.items()}
        self._listeners = listening_sockets(services, option="--listen")
        with ExitStack() as opened:
            for listener in self._listeners.values():
                opened.enter_context(listener)
            self._log = AccessLog(settings.access_log, self._on_message)
            opened.pop_all()
        self.http_port, self.grpc_port, self.metrics_port = (
            listener.getsockname()[1] for listener in self._listeners.values()
        )
        self._folder: Path | None = None
        self._lock = -1
        self._haproxy: HAProxy | None = None
        self._options: GatewayOptions | None = None
        self.upstreams: Upstreams | None = None
        self._changing = threading.Lock()  # held while HAProxy is started again, reloads or changes its configuration
        self._metrics: MetricsEndpoint | None = None
        self._states = self._file_states()
        self._looked = time.monotonic()

    @property
    def http_url(self) -> str:
        return f"http{self._tls}://{self.settings.listen}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"grpc{self._tls}://{self.settings.listen}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"http{self._tls}://{self.settings.listen}:{self.metrics_port}/metrics"

    @property
    def _tls(self) -> str:
        return "s" if self._pem else ""

    @property
    def restarts(self) -> int:
        """How often HAProxy was started again."""
        return self._restarts.count

    @property
    def pid(self) -> int:
        """Process ID of HAProxy, or 0 if HAProxy is not running."""
        return self._haproxy.pid if self._haproxy is not None else 0

    def start(
        self,
        server: TritonServer,
        *,
        front: Front | None = None,
        sources: Mapping[str, Callable[[], str]] | None = None,
        rollouts: bool = False,
    ) -> None:
        """Start HAProxy in front of a server that is ready; after an error, call `stop`.

        server: a server with the options of `behind_gateway`.
        front: the service behind ``/classify`` that asks ``server``, with `front_secret`; None refuses this path.
        sources: name → function that returns more metrics in Prometheus' text format.
        rollouts: True if another server can take its place (`upstreams`).
        Errors: ServerError when HAProxy does not start. RepositoryError when a configuration cannot be read.
        """
        self._folder, self._lock = new_run_folder("gateway")
        folder = self._folder
        joined = {
            "gateway": lambda: text_from_socket(folder / "exporter.sock", _EXPORTER_PATH),
            "server": lambda: text_from_url(server.metrics_url),
            "gmmvit": self._own_metrics,
            **(sources or {}),
        }
        self._metrics = MetricsEndpoint(_LOOPBACK, 0, lambda: joined_metrics(joined))
        options = gateway_options(
            self.settings,
            server.models,
            server.repository,
            binds={service: f"fd@{listener.fileno()}" for service, listener in self._listeners.items()},
            upstreams=first_upstreams(server, front=front, rollouts=rollouts),
            front=front,
        )
        options = replace(
            options,
            sockets=str(folder),
            access_log=f"fd@{self._log.descriptor}",
            metrics_address=f"{_LOOPBACK}:{self._metrics.port}",
            admin=(ADMIN_HEADER, self.admin_secret),
            threads=max(1, min(4, cores() // 2)),  # the other cores are for the network
        )
        for check in options.health:
            if check.why_not:
                self._note(f"gateway: the readiness does not run the network: {check.why_not}")
        self._options = options
        self._haproxy = HAProxy(
            self._program,
            write_files(folder, options, self._keys, self._pem),
            socket_path=folder / "admin.sock",
            passed=(self._log.descriptor, *(listener.fileno() for listener in self._listeners.values())),
            on_log_line=self._note,
        )
        self._haproxy.start()
        self.upstreams = Upstreams(self._haproxy, options.upstreams, front=front is not None) if rollouts else None

    def step(self) -> None:
        """Reload changed keys or a certificate, and restart HAProxy if it has ended.

        Errors: ServerError when HAProxy ends again and again.
        """
        with self._changing:
            if self._haproxy is not None and self._haproxy.ended:
                self._restart(self._haproxy)
        if time.monotonic() - self._looked > _LOOK_S:
            self._looked = time.monotonic()
            states = self._file_states()
            if states != self._states:
                self._states = states
                self.reload()

    def reload(self) -> None:
        """Read keys and certificate again; with an invalid file, keep those of before, and log the reason.

        Open connections go on, and their next requests need a key of the new file.
        """
        with self._changing:
            if self._haproxy is not None and self._folder is not None:
                self._reload(self._haproxy, self._folder)

    def _reload(self, haproxy: HAProxy, folder: Path) -> None:
        try:
            keys, pem = read_keys(self.settings.keys), tls_pem(self.settings)
            _load_keys(haproxy, keys)
            if pem != self._pem:
                _load_certificate(haproxy, pem)
        except GmmvitError as exc:
            self.reload_failed = True
            self._note(f"gateway: nothing was reloaded: {exc}")
            return
        self.reload_failed = False
        self._keys, self._pem = keys, pem
        # A HAProxy that is started again reads the files.
        (folder / "keys.map").write_text(map_text(map_of_keys(keys)), encoding="utf-8")
        if pem:
            (folder / "tls.pem").write_text(pem, encoding="ascii")
        self.key_reloads += 1
        self._note(
            f"gateway: reloaded {len(keys)} key{'s' if len(keys) > 1 else ''}" + (" and the certificate" if pem else "")
        )

    def serve(self, served: Sequence[ServedModels]) -> None:
        """Pass on requests for these models; another thread than that of `step` may call it.

        If the list of models, the check of a server or the size of the buffers changes, a new HAProxy takes over the
        listening sockets: larger images need larger buffers, because only a request that fits into a buffer may wait.
        Errors: ServerError when HAProxy does not take the configuration.
        """
        with self._changing:
            if self._options is None or self._haproxy is None or self._folder is None or self.upstreams is None:
                raise ServerError("the gateway is not running, or permits no rollouts")
            now = replace(self._options, upstreams=self.upstreams.current)
            changed = options_for(now, served)
            if changed == now:
                return
            write_files(self._folder, changed, self._keys, self._pem)
            try:
                self._haproxy.hand_over()
            except ServerError:
                write_files(self._folder, now, self._keys, self._pem)
                raise
            self._options = changed
        self._note(f"gateway: configured for {', '.join(changed.models)}, buffers of {changed.buffer_bytes} bytes")

    @property
    def leaving(self) -> bool:
        """True while a HAProxy with a configuration from before the last `serve` has connections, at most 30 s."""
        return self._haproxy is not None and self._haproxy.leaving

    def stop(self) -> None:
        """Refuse new connections, wait for requests in progress for at most 20 s, and remove all files."""
        for listener in self._listeners.values():
            listener.close()
        with self._changing:  # `serve` starts no HAProxy afterwards
            haproxy, self._haproxy = self._haproxy, None
        if haproxy is not None:
            haproxy.stop(_STOP_S)
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        self._log.close()
        if self._folder is not None:
            remove_run_folder(self._folder, self._lock)
            self._folder = None

    def kill_now(self) -> None:
        """Kill HAProxy at once, as a signal handler may; call `stop` afterwards."""
        if self._haproxy is not None:
            self._haproxy.kill_now()

    def _restart(self, haproxy: HAProxy) -> None:
        self._restarts.add(haproxy.last_words())
        self._note(f"gateway: HAProxy has ended ({haproxy.end}) and is started again: {haproxy.last_words()}")
        if self.upstreams is not None and self._folder is not None and self._options is not None:
            changed = replace(self._options, upstreams=self.upstreams.current)
            write_files(self._folder, changed, self._keys, self._pem)
        haproxy.start()

    def _own_metrics(self) -> str:
        metrics = [
            ("restarts_total", "counter", "Times that HAProxy had ended and was started again", self.restarts),
            ("key_reloads_total", "counter", "Times that the key file was reloaded", self.key_reloads),
            ("keys", "gauge", "Keys that the gateway accepts", len(self._keys)),
            ("reload_failed", "gauge", "1 if the last reload of keys and certificate failed", int(self.reload_failed)),
        ]
        if self._pem:
            meaning = "Unix time at which the certificate of the gateway expires"
            metrics.append(("certificate_expiry_seconds", "gauge", meaning, int(expiry_of(self._pem).timestamp())))
        return "".join(metric_text(f"gmmvit_gateway_{name}", kind, text, [("", n)]) for name, kind, text, n in metrics)

    def _file_states(self) -> tuple[object, ...]:
        paths = (self.settings.keys, self.settings.tls_cert, self.settings.tls_key)
        return tuple(_state(path) for path in paths if path is not None)

    def _on_message(self, line: str) -> None:
        if self._haproxy is not None:
            self._haproxy.add_line(line)


def _state(path: Path) -> object:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _load_keys(haproxy: HAProxy, keys: Mapping[str, Client]) -> None:
    """Replace all keys at once: a request sees either the old or the new keys."""
    lines = map_text(map_of_keys(keys)).splitlines()
    answer = haproxy.command("prepare map keys.map")
    version = answer.rpartition(" ")[2]
    if not version.isdigit():
        raise ServerError(f"HAProxy did not take the keys: {answer}")
    problems = ""
    for first in range(0, len(lines), _LINES_OF_A_COMMAND):
        some = "\n".join(lines[first : first + _LINES_OF_A_COMMAND])
        problems += haproxy.command(f"add map @{version} keys.map", payload=some)
    held = len(haproxy.command(f"show map @{version} keys.map").splitlines())
    if held != len(lines):
        raise ServerError(f"HAProxy took {held} of {len(lines)} entries of keys{problems and ': ' + problems}")
    problems += haproxy.command(f"commit map @{version} keys.map")
    if problems:
        raise ServerError(f"HAProxy did not take the keys: {problems}")


def _load_certificate(haproxy: HAProxy, pem: str) -> None:
    answer = haproxy.command("set ssl cert tls.pem", payload=pem)
    answer += haproxy.command("commit ssl cert tls.pem")
    if "Success" not in answer:
        raise ServerError(f"HAProxy did not take the certificate: {answer}")


class AccessLog:
    """Writes the lines that arrive at `descriptor`, which HAProxy inherits, up to `close`: a line of JSON a request.

    HAProxy sends its own messages, such as "Proxy http stopped", to the log of the requests, and 2.6 cannot tell them
    apart. HAProxy therefore writes to a pipe, and a thread passes lines of JSON on to the access log, and messages to
    the log of the gateway. HAProxy never waits: it drops lines while the pipe is full, for example on a full disk.
    """

    def __init__(self, path: Path | None, on_message: Callable[[str], None]) -> None:
        """path: the file to which lines of JSON are appended; None means stderr.
        on_message: called with each other line, in a thread.
        Errors: OutputError when the file cannot be opened.
        """
        self._target = _opened(path) if path is not None else os.dup(2)
        self._on_message = on_message
        self._source, self.descriptor = os.pipe()
        with suppress(OSError):  # users with many pipes get small pipes
            fcntl.fcntl(self.descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._thread = threading.Thread(target=self._pass_on, name="gmmvit-access-log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what HAProxy has written, and close the log.  HAProxy must have ended.  It may be called again."""
        if self.descriptor < 0:
            return
        os.close(self.descriptor)
        self.descriptor = -1
        self._thread.join(timeout=5)

    def _pass_on(self) -> None:
        rest = b""
        while piece := os.read(self._source, _READ_BYTES):
            *lines, rest = (rest + piece).split(b"\n")
            self._write(lines)
            if len(piece) < _READ_BYTES:
                time.sleep(_PAUSE_S)
        self._write([rest] if rest else [])
        os.close(self._source)
        os.close(self._target)

    def _write(self, lines: list[bytes]) -> None:
        requests = b"".join(line + b"\n" for line in lines if line.startswith(b"{"))
        with suppress(OSError):  # the disk is full, or the reader of stderr has ended
            while requests:
                requests = requests[os.write(self._target, requests) :]
        for line in lines:
            if line and not line.startswith(b"{"):
                self._on_message(line.decode(errors="replace"))


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as exc:
        raise OutputError(
            f"{path}: cannot open this file for the access log: {exc.strerror}",
            hint="type --access-log with a file in a folder that exists and that this user can write",
        ) from exc
