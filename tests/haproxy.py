"""A real HAProxy before a real server, with TLS, keys, a list of paths and a short queue, for tests of clients.

The configuration is written here, apart from the package's own: clients must cope with every gateway of this kind.
"""

from __future__ import annotations

import csv
import io
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.certificates import Certificate, self_signed
from tests.waiting import wait_until

KEY = "k3y-of-alice"

needs_haproxy = pytest.mark.skipif(
    shutil.which("haproxy") is None, reason="no HAProxy on PATH; on Debian, type apt-get install haproxy"
)

_OVERLOADED = (
    "HTTP/1.1 200 OK\r\ncontent-type: application/grpc\r\ncontent-length: 0\r\n"
    "grpc-status: 8\r\ngrpc-message: the queue is full\r\n\r\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallGateway:
    """A running gateway.

    http_url, grpc_url: with TLS and keys. grpc503_url refuses as HTTP does, with the status 503 and without a gRPC
    status; it needs no key.
    key_file: a client's key file.  certificate: what clients trust.  stats: the socket of HAProxy's statistics.
    """

    http_url: str
    grpc_url: str
    grpc503_url: str
    key_file: Path
    certificate: Certificate
    stats: Path

    def url(self, protocol: str) -> str:
        return {"http": self.http_url, "grpc": self.grpc_url, "grpc503": self.grpc503_url}[protocol]

    def command(self, text: str) -> str:
        """Return the answer of HAProxy's runtime API."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.stats))
            connection.sendall(f"{text}\n".encode())
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode()

    def requests(self, protocol: str) -> int:
        """Return the number of requests over a protocol since the start."""
        rows = csv.DictReader(io.StringIO(self.command("show stat").removeprefix("# ")))
        return next(int(row["req_tot"]) for row in rows if (row["pxname"], row["svname"]) == (protocol, "FRONTEND"))


@contextmanager
def small_gateway(
    triton_http: int, triton_grpc: int, *, maxconn: int = 64, queue_ms: int = 5000, most_bytes: int = 100_000
) -> Iterator[SmallGateway]:
    """Run HAProxy before a server on this machine.

    triton_http, triton_grpc: the ports of the server.
    maxconn: the number of requests at a time.  queue_ms: the longest wait for a place.
    most_bytes: the largest body.  Over gRPC, the gateway reads at most 128 KiB before it decides.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gmmvit-test-haproxy-")))
        listeners = {name: stack.enter_context(_listener()) for name in ("http", "grpc", "grpc503")}
        certificate = self_signed(folder)
        (folder / "keys.map").write_text(f"{KEY} alice\n")
        (folder / "key.txt").write_text(f"{KEY}\n")
        (folder / "overloaded.http").write_text(_OVERLOADED, newline="")
        files = {name: listener.fileno() for name, listener in listeners.items()}
        servers = {"triton_http": triton_http, "triton_grpc": triton_grpc}
        (folder / "haproxy.cfg").write_text(
            _configuration(folder, files, servers, maxconn=maxconn, queue_ms=queue_ms, most_bytes=most_bytes)
        )
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                ["haproxy", "-db", "-f", str(folder / "haproxy.cfg")],
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[listener.fileno() for listener in listeners.values()],
            )
        stack.callback(process.wait, 10)
        stack.callback(process.terminate)
        wait_until(lambda: (folder / "stats").exists() or process.poll() is not None, "HAProxy's statistics")
        assert process.poll() is None, (folder / "log").read_text()
        ports = {name: listener.getsockname()[1] for name, listener in listeners.items()}
        yield SmallGateway(
            http_url=f"https://127.0.0.1:{ports['http']}",
            grpc_url=f"grpcs://127.0.0.1:{ports['grpc']}",
            grpc503_url=f"grpcs://127.0.0.1:{ports['grpc503']}",
            key_file=folder / "key.txt",
            certificate=certificate,
            stats=folder / "stats",
        )


def _configuration(
    folder: Path, files: dict[str, int], servers: dict[str, int], *, maxconn: int, queue_ms: int, most_bytes: int
) -> str:
    """files: name of a frontend → descriptor of its listening socket.  servers: name of a backend → port."""
    tls = f"ssl crt {folder / 'server.pem'} alpn"
    has_key = f"{{ req.hdr(authorization),regsub(^Bearer\\ ,),map({folder / 'keys.map'}) -m found }}"
    json = "content-type application/json string"
    no_grpc = "http-request return status 200 content-type application/grpc hdr grpc-status"
    return f"""global
  stats socket {folder / "stats"} mode 600 level admin
  tune.bufsize 131072
defaults
  mode http
  timeout connect 2s
  timeout client 60s
  timeout server 60s
  timeout http-request 10s
  timeout queue {queue_ms}ms

frontend http
  bind fd@{files["http"]} {tls} h2,http/1.1
  http-error status 503 {json} '{{"error": "the queue is full"}}' hdr retry-after 1
  acl offered path_reg ^/v2/models/gmmvit(_network)?/(infer|config)$
  http-request return status 401 {json} '{{"error": "no such key"}}' unless {has_key}
  http-request return status 404 {json} '{{"error": "no such path"}}' unless offered
  http-request return status 413 {json} '{{"error": "too big"}}' if {{ req.hdr_val(content-length) gt {most_bytes} }}
  default_backend triton_http

frontend grpc
  bind fd@{files["grpc"]} {tls} h2
  errorfile 503 {folder / "overloaded.http"}
  acl offered path_reg ^/inference[.]GRPCInferenceService/(ModelInfer|ModelConfig)$
  # An answer before the end of the body would end the stream with CANCELLED in place of the status.
  http-request wait-for-body time 5s
  {no_grpc} 16 hdr grpc-message "no such key" unless {has_key}
  {no_grpc} 12 hdr grpc-message "no such path" unless offered
  {no_grpc} 8 hdr grpc-message "larger than allowed" if {{ req.body_size gt {most_bytes} }}
  default_backend triton_grpc

frontend grpc503
  bind fd@{files["grpc503"]} {tls} h2
  default_backend triton_grpc

backend triton_http
  server triton 127.0.0.1:{servers["triton_http"]} maxconn {maxconn}
backend triton_grpc
  server triton 127.0.0.1:{servers["triton_grpc"]} proto h2 maxconn {maxconn}
"""


@contextmanager
def held(gateway: SmallGateway, protocol: str) -> Iterator[None]:
    """Let the server take no request, so that the gateway refuses each as it does when its queue is full."""
    server = f"triton_{protocol}/triton"
    gateway.command(f"disable server {server}")
    try:
        yield
    finally:
        gateway.command(f"enable server {server}")


@contextmanager
def _listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        yield listener
