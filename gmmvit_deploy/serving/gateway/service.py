"""Run HAProxy in front of a Triton server: start, reload of keys and certificate, restart, stop.

    Gateway(settings)      checks keys, certificate and ports, before anything is started
    gateway.start(server)  starts HAProxy in front of a server that is ready
    gateway.step()         call it often: it reloads changed files, and restarts a HAProxy that has ended
    gateway.stop()         waits for requests in progress

`serving.service.GatewayService` does all of it, with the server.
"""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from gmmvit_deploy.errors import GmmvitError, ServerError
from gmmvit_deploy.files.leftovers import new_run_folder, remove_run_folder
from gmmvit_deploy.runtimes.programs.cores import cores
from gmmvit_deploy.serving.gateway.access_log import AccessLog
from gmmvit_deploy.serving.gateway.config import EXPORTER_PATH
from gmmvit_deploy.serving.gateway.files import gateway_options, tls_pem, write_files
from gmmvit_deploy.serving.gateway.handover import Changes, options_for
from gmmvit_deploy.serving.gateway.haproxy import HAProxy, find_haproxy
from gmmvit_deploy.serving.gateway.keys import map_text, read_keys, readable_by_others
from gmmvit_deploy.serving.gateway.listeners import opened_listeners
from gmmvit_deploy.serving.gateway.metrics import certificate_metric, joined_metrics, text_from_socket
from gmmvit_deploy.serving.gateway.options import Front, GatewayFiles, GatewayOptions, GatewaySettings
from gmmvit_deploy.serving.gateway.places import Places, first_upstreams
from gmmvit_deploy.serving.local_http import text_from_url
from gmmvit_deploy.serving.metric_text import metric_text
from gmmvit_deploy.serving.served_models import ServedModels, read_models
from gmmvit_deploy.serving.server import ADMIN_HEADER, ServerOptions, TritonServer
from gmmvit_deploy.serving.supervisor_metrics import MetricsEndpoint

__all__ = ["Gateway", "behind_gateway"]

_QUANTILES = "0.5:0.05,0.9:0.01,0.99:0.001"
_LOOPBACK = "127.0.0.1"
_LOOK_S = 0.5  # the time between two looks at the key file and the certificate
_MOST_RESTARTS, _RESTART_WINDOW_S = 5, 60.0
_STOP_S = 20.0
_SOURCE_S = 5.0  # the maximum time for the metrics of the server


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


class Gateway:
    """HAProxy in front of a server.  Create, start, step and stop it in the same thread.

    Errors of the constructor, which starts nothing: InputError for an invalid key file or certificate. ServerError
    when HAProxy is not installed or a port cannot be opened. OutputError when the access log cannot be opened.
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
        """http_port, grpc_port, metrics_port: the ports on ``settings.listen``; 0 means any free port."""
        self.settings = settings
        self.admin_secret, self.front_secret = secrets.token_hex(16), secrets.token_hex(16)
        self.key_reloads = self.restarts = 0
        self.reload_failed = False
        self._on_log_line = on_log_line
        self._program = find_haproxy()
        self._keys = read_keys(settings.keys)
        self._pem = tls_pem(settings)
        if readable_by_others(settings.keys):
            self._note(f"gateway: other users of this machine can read {settings.keys}; type chmod 600 {settings.keys}")
        ports = {"HTTP": http_port, "gRPC": grpc_port, "metrics": metrics_port}
        self._listeners = opened_listeners(settings.listen, ports)
        self.http_port, self.grpc_port, self.metrics_port = (
            listener.getsockname()[1] for listener in self._listeners.values()
        )
        try:
            self._log = AccessLog(settings.access_log, self._on_message)
        except BaseException:
            self._close_listeners()
            raise
        self._folder: Path | None = None
        self._lock = -1
        self._haproxy: HAProxy | None = None
        self._options: GatewayOptions | None = None
        self.places: Places | None = None
        self._changes = Changes()
        self._metrics: MetricsEndpoint | None = None
        self._restarted: deque[float] = deque(maxlen=_MOST_RESTARTS)
        self._hangup = False
        self._handler: Any = None
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
        rollouts: True to keep a second place for a server (`gateway.places`); the server then takes the first place.
        Errors: ServerError when HAProxy does not start. RepositoryError when a configuration cannot be read.
        """
        self._folder, self._lock = new_run_folder("gateway")
        folder = self._folder
        models = read_models(server.repository)
        upstreams = first_upstreams(server, models.bundle, front=front, rollouts=rollouts)
        exporter = folder / "exporter.sock"
        joined = {
            "gateway": lambda: text_from_socket(exporter, EXPORTER_PATH),
            "server": lambda: text_from_url(server.metrics_url, timeout_s=_SOURCE_S),
            "gmmvit": self._own_metrics,
            **(sources or {}),
        }
        self._metrics = MetricsEndpoint(_LOOPBACK, 0, lambda: joined_metrics(joined))
        options = gateway_options(
            self.settings,
            models,
            server.repository,
            binds={service: f"fd@{listener.fileno()}" for service, listener in self._listeners.items()},
            upstreams=upstreams,
            files=GatewayFiles(socket=str(folder / "admin.sock"), exporter=str(exporter)),
            front=front,
        )
        options = replace(
            options,
            access_log=f"fd@{self._log.descriptor}",
            metrics_address=f"{_LOOPBACK}:{self._metrics.port}",
            admin=(ADMIN_HEADER, self.admin_secret),
            threads=max(1, min(4, cores() // 2)),  # the other cores are for the network
        )
        if not models.health.infers:
            self._note(f"gateway: the readiness does not run the network: {models.health.why_not}")
        self._options = options
        self._haproxy = HAProxy(
            self._program,
            write_files(folder, options, self._keys, self._pem),
            socket_path=folder / "admin.sock",
            passed=(self._log.descriptor, *(listener.fileno() for listener in self._listeners.values())),
            on_log_line=self._on_log_line,
        )
        self._haproxy.start()
        self._wait_ready(self._haproxy)
        self.places = Places(self._haproxy, options.upstreams, front=front is not None) if rollouts else None
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGHUP, self._on_hangup)

    def step(self) -> bool:
        """Reload changed keys or a certificate, restart HAProxy if it has ended, carry out `serve`.  Returns False.

        Errors: ServerError when HAProxy ends again and again.
        """
        if self._haproxy is not None and self._haproxy.ended:
            self._restart(self._haproxy)
        self._changes.carry_out(self._hand_over)
        if self._hangup or time.monotonic() - self._looked > _LOOK_S:
            self._looked = time.monotonic()
            states = self._file_states()
            if self._hangup or states != self._states:
                self._hangup, self._states = False, states
                self.reload()
        return False

    def reload(self) -> None:
        """Read keys and certificate again.  Open connections go on, and their next requests need a key of the new file.

        With an invalid file, the gateway keeps the keys and the certificate that it has, and logs the reason.
        """
        if self._haproxy is None or self._folder is None:
            return
        try:
            keys, pem = read_keys(self.settings.keys), tls_pem(self.settings)
            _load_keys(self._haproxy, keys)
            if pem != self._pem:
                _load_certificate(self._haproxy, pem)
        except GmmvitError as exc:
            self.reload_failed = True
            self._note(f"gateway: nothing was reloaded: {exc}")
            return
        self.reload_failed = False
        self._keys, self._pem = keys, pem
        # A HAProxy that is started again reads the files.
        (self._folder / "keys.map").write_text(map_text(keys), encoding="utf-8")
        if pem:
            (self._folder / "tls.pem").write_text(pem, encoding="ascii")
        self.key_reloads += 1
        self._note(
            f"gateway: reloaded {len(keys)} key{'s' if len(keys) > 1 else ''}" + (" and the certificate" if pem else "")
        )

    def serve(self, repositories: Sequence[Path]) -> None:
        """Pass on requests for the models of these repositories.  Call it in another thread than `step`, which does it.

        Errors: those of `read_models`, and ServerError when HAProxy does not take the configuration.
        """
        self._changes.ask([read_models(repository) for repository in repositories])

    @property
    def leaving(self) -> bool:
        """True while a HAProxy with a configuration from before the last `serve` has connections, at most 30 s."""
        return self._haproxy is not None and self._haproxy.leaving

    def _hand_over(self, served: Sequence[ServedModels]) -> None:
        if self._options is None or self._haproxy is None or self._folder is None or self.places is None:
            raise ServerError("the gateway is not running, or has no places for rollouts")
        now = replace(self._options, upstreams=self.places.upstreams)
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

    def stop(self) -> None:
        """Refuse new connections, wait for requests in progress for at most 20 s, and remove all files."""
        if self._handler is not None:
            signal.signal(signal.SIGHUP, self._handler)
            self._handler = None
        self._close_listeners()
        if self._haproxy is not None:
            self._haproxy.stop(_STOP_S)
            self._haproxy = None
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        self._log.close()
        if self._folder is not None:
            remove_run_folder(self._folder, self._lock)
            self._folder = None

    def kill_now(self) -> None:
        """Kill HAProxy at once.  A signal handler may call `kill_now`; call `stop` afterwards to clean up."""
        if self._haproxy is not None:
            self._haproxy.kill_now()

    def _close_listeners(self) -> None:
        for listener in self._listeners.values():
            listener.close()

    def _wait_ready(self, haproxy: HAProxy, *, timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not haproxy.ended:
            with suppress(ServerError):
                if haproxy.command("show info"):
                    return
            time.sleep(0.02)
        raise ServerError(f"HAProxy did not start: {haproxy.last_words()}")

    def _restart(self, haproxy: HAProxy) -> None:
        now = time.monotonic()
        if len(self._restarted) == _MOST_RESTARTS and now - self._restarted[0] < _RESTART_WINDOW_S:
            raise ServerError(f"HAProxy ended {_MOST_RESTARTS + 1} times in a minute: {haproxy.last_words()}")
        self._restarted.append(now)
        self.restarts += 1
        self._note(f"gateway: HAProxy has ended ({haproxy.end}) and is started again: {haproxy.last_words()}")
        if self.places is not None and self._folder is not None and self._options is not None:
            changed = replace(self._options, upstreams=self.places.upstreams)
            write_files(self._folder, changed, self._keys, self._pem)
        haproxy.start()
        self._wait_ready(haproxy)

    def _own_metrics(self) -> str:
        haproxy = self._haproxy
        metrics = (
            ("restarts_total", "counter", "Times that HAProxy had ended and was started again", self.restarts),
            ("key_reloads_total", "counter", "Times that the key file was reloaded", self.key_reloads),
            ("keys", "gauge", "Keys that the gateway accepts", len(self._keys)),
            ("reload_failed", "gauge", "1 if the last reload of keys and certificate failed", int(self.reload_failed)),
        )
        own = [metric_text(f"gmmvit_gateway_{name}", kind, text, [("", n)]) for name, kind, text, n in metrics]
        return "".join(own) + (certificate_metric(haproxy) if haproxy is not None else "")

    def _file_states(self) -> tuple[object, ...]:
        paths = (self.settings.keys, self.settings.tls_cert, self.settings.tls_key)
        return tuple(_state(path) for path in paths if path is not None)

    def _on_hangup(self, number: int, frame: FrameType | None) -> None:
        self._hangup = True

    def _on_message(self, line: str) -> None:
        if self._haproxy is not None:
            self._haproxy.add_line(line)

    def _note(self, line: str) -> None:
        if self._on_log_line is not None:
            self._on_log_line(line)


def _state(path: Path) -> object:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _load_keys(haproxy: HAProxy, keys: Mapping[str, str]) -> None:
    """Replace all keys at once: a request sees either the old or the new keys."""
    answer = haproxy.command("prepare map keys.map")
    version = answer.rpartition(" ")[2]
    if not version.isdigit():
        raise ServerError(f"HAProxy did not take the keys: {answer}")
    problems = haproxy.command(f"add map @{version} keys.map", payload=map_text(keys))
    problems += haproxy.command(f"commit map @{version} keys.map")
    if problems:
        raise ServerError(f"HAProxy did not take the keys: {problems}")


def _load_certificate(haproxy: HAProxy, pem: str) -> None:
    answer = haproxy.command("set ssl cert tls.pem", payload=pem)
    answer += haproxy.command("commit ssl cert tls.pem")
    if "Success" not in answer:
        raise ServerError(f"HAProxy did not take the certificate: {answer}")
