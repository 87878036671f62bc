"""A real HAProxy in front of a real Triton server: what it lets in, what it refuses and how, over HTTP and gRPC."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import numpy as np
import pytest
from PIL import Image
from tritonclient.grpc import service_pb2

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.runtimes.engines.releases import triton_in_words
from gmmvit_deploy.serving.gateway.gateway import Gateway, behind_gateway
from gmmvit_deploy.serving.gateway.options import Front, GatewaySettings
from gmmvit_deploy.serving.repository import Repository
from gmmvit_deploy.serving.server import ADMIN_HEADER, ServerOptions, TritonServer
from tests.certificates import self_signed
from tests.conftest import FREE_PORTS
from tests.haproxy import needs_haproxy
from tests.hostile import grpc_requests
from tests.hostile.http_requests import Held
from tests.serving.commands import Serve, metric_values, stub_of, wait_gone
from tests.serving.gateways import (
    KEY,
    OTHER_KEY,
    Answer,
    Stub,
    binary_request,
    grpc_request,
    key_file,
    logits_of,
    request,
    running_service,
)
from tests.serving.shared import MAX_BODY_BYTES, SECRET, Running, shared_service
from tests.serving.stand_in import answers_held, sleeping_repository
from tests.waiting import everything_was_read, wait_until

pytestmark = [needs_haproxy, pytest.mark.integration]
INFER = "/v2/models/gmmvit_network/infer"
RAW = {"Inference-Header-Content-Length": "0"}

Open = Callable[..., Gateway]


@pytest.fixture(scope="session")
def service(bundle: Bundle, shared_by_run: Path) -> dict[str, Running]:
    """The server and the gateway that all processes of the run ask."""
    return shared_service("gateway", bundle.path, shared_by_run)


@pytest.fixture(scope="session")
def triton(service: dict[str, Running]) -> Running:
    """A server for several gateways; its admin interfaces need the secret."""
    return service["server"]


@pytest.fixture(scope="session")
def gateway(service: dict[str, Running]) -> Running:
    return service["gateway"]


@pytest.fixture(scope="module")
def open_gateway(triton: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Start a gateway with these settings in front of a server, by default `triton`."""
    opened: list[Gateway] = []

    def start(server: Any = triton, on_log_line: Any = None, front: Any = None, **settings: Any) -> Gateway:
        folder = tmp_path_factory.mktemp("gateway")
        settings = {
            "keys": key_file(folder),
            "access_log": folder / "access.log",
            "max_body_bytes": MAX_BODY_BYTES,
            **settings,
        }
        gateway = Gateway(GatewaySettings(**settings), **FREE_PORTS, on_log_line=on_log_line)
        opened.append(gateway)
        gateway.admin_secret = SECRET
        gateway.start(server, front=front)
        return gateway

    yield start
    for gateway in opened:
        gateway.stop()


@pytest.fixture
def pixels(bundle: Bundle) -> np.ndarray:
    return bundle.golden()[0]


def log_lines(gateway: Running, count: int) -> list[dict[str, Any]]:
    """Return the last lines of the access log, of which HAProxy writes each after its answer."""
    log = gateway.settings.access_log
    assert log is not None
    wait_until(lambda: len(log.read_text().splitlines()) >= count, f"{count} lines of the access log")
    return [json.loads(line) for line in log.read_text().splitlines()[-count:]]


def backend_sessions(gateway: Gateway, backend: str) -> float:
    """Return the number of requests that wait for a server of a backend of HAProxy, or are in it."""
    return metric_values(gateway.metrics_url, "haproxy_backend_current_sessions")[f'{{proxy="{backend}"}}']


def raw_answer(gateway: Running, data: bytes) -> bytes:
    """Send bytes on a connection of their own, and return all that is answered."""
    with socket.create_connection(("127.0.0.1", gateway.http_port), timeout=20) as connection:
        connection.sendall(data)
        return connection.makefile("rb").read()


def json_request(value: int) -> bytes:
    """Return a request whose pixels are JSON, each with this value."""
    tensor = {"name": "pixels", "shape": [1, 32, 32, 3], "datatype": "UINT8", "data": [value] * 3072}
    return json.dumps({"inputs": [tensor]}).encode()


class TestHttp:
    def test_a_key_opens_the_labels_of_a_photo(self, gateway: Running, bundle: Bundle) -> None:
        file = io.BytesIO()
        Image.fromarray(bundle.golden()[0][0]).save(file, "PNG")
        infer, headers = "/v2/models/gmmvit_classify/infer", {**RAW, "Content-Type": "application/octet-stream"}
        answer = request(gateway.http_url, infer, file.getvalue(), headers=headers)
        assert answer.status == 200, answer.body
        assert bundle.manifest.labels[bundle.golden()[1][0].argmax()].encode() in answer.body
        assert request(gateway.http_url, infer, file.getvalue(), key="", headers=headers).status == 401

    def test_a_key_opens_the_model(self, gateway: Running, bundle: Bundle, pixels: np.ndarray) -> None:
        body, headers = binary_request("pixels", pixels)
        answer = request(gateway.http_url, INFER, body, headers=headers)
        assert answer.status == 200, answer.body
        assert float(np.abs(logits_of(answer) - bundle.golden()[1]).max()) < 1e-5
        assert answer.headers["x-gmmvit-bundle"] == bundle.sha256
        assert answer.headers["x-gmmvit-runner"] == gateway.models.runner

    @pytest.mark.parametrize("key", [None, "another-key-that-nobody-has", ""])
    @pytest.mark.parametrize("path", [INFER, "/v2", "/v2/logging", "/metrics"])
    def test_no_key(self, key: str | None, path: str, gateway: Running) -> None:
        answer = request(gateway.http_url, path, b"x" if path == INFER else None, key=key)
        assert answer.status == 401
        assert "Bearer KEY" in answer.json()["error"]
        assert answer.headers["www-authenticate"] == "Bearer"

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("POST", "/v2/logging"),
            ("GET", "/v2/logging"),
            ("POST", "/v2/trace/setting"),
            ("POST", "/v2/repository/index"),
            ("POST", "/v2/repository/models/gmmvit/unload"),
            ("POST", "/v2/systemsharedmemory/region/x/register"),
            ("POST", "/v2/models/gmmvit/trace/setting"),
            ("POST", "/v2/models/gmmvit_network/generate"),
            ("POST", "/v2/models/resnet/infer"),
            ("POST", "/v2/models/gmmvit_network/../../logging"),
            ("POST", "/v2/models/gmmvit_network/infer/"),
            ("POST", "/v2/models/gmmvit%2f/infer"),
            ("PUT", INFER),
            ("POST", "/v2"),
            ("GET", "/"),
            ("GET", "/metrics"),
            ("POST", "/classify"),
        ],
    )
    def test_everything_else_is_404(self, method: str, path: str, gateway: Running) -> None:
        body = b'{"log_error": false}' if method in ("POST", "PUT") else None
        assert request(gateway.http_url, path, body, method=method).status == 404

    @pytest.mark.parametrize("path", ["", "/models/gmmvit", "/models/gmmvit/config", "/models/gmmvit_network/ready"])
    def test_metadata(self, path: str, gateway: Running) -> None:
        assert request(gateway.http_url, f"/v2{path}").status == 200

    def test_the_gateway_adds_the_secret_to_requests_for_statistics(self, gateway: Running) -> None:
        answer = request(gateway.http_url, "/v2/models/gmmvit_network/stats")
        assert answer.json()["model_stats"][0]["name"] == "gmmvit_network"

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("POST", "/v2/repository/index"),
            ("GET", "/v2/logging"),
            ("GET", "/v2/trace/setting"),
            ("GET", "/v2/systemsharedmemory/status"),
            ("GET", "/v2/models/gmmvit_network/stats"),
        ],
    )
    def test_administration_needs_the_secret(self, method: str, path: str, triton: Running) -> None:
        for secret, status in (("", 403), ("wrong", 403), (SECRET, 200)):
            headers = {ADMIN_HEADER: secret} if secret else {}
            assert request(triton.http_url, path, method=method, headers=headers).status == status

    def test_the_277_bytes_that_end_a_server(self, gateway: Running, triton: Running) -> None:
        body = gzip.compress(b"[" * 250_000)
        assert len(body) < 300
        assert request(gateway.http_url, INFER, body, headers={"Content-Encoding": "gzip"}).status == 415
        assert request(gateway.http_url, INFER, b"[" * 200_000).status == 400
        assert request(gateway.http_url, INFER, b"[" * 200_000, headers=RAW | {"X-A": "1"}).status in (400, 500)
        assert request(triton.http_url, "/v2/health/ready").status == 200

    @pytest.mark.parametrize("size", [MAX_BODY_BYTES + 1, 30_000_000])
    def test_too_large(self, size: int, gateway: Running) -> None:
        answer = request(gateway.http_url, INFER, bytes(size), headers=RAW)
        assert answer.status == 413
        assert f"the limit is {MAX_BODY_BYTES} bytes" in answer.json()["error"]

    def test_no_number_of_json_wraps(self, gateway: Running) -> None:
        whole = json_request(300)
        answer = request(gateway.http_url, INFER, whole)
        assert answer.status == 400
        assert "binary tensors" in answer.json()["error"]
        head = {"Inference-Header-Content-Length": str(len(whole))}
        assert "expected up to 4096 bytes" in request(gateway.http_url, INFER, whole, headers=head).json()["error"]

    @pytest.mark.parametrize(
        "length", ["+{}", "0{}", "-{}", "{}.0", "0x{:x}", "{}, {}", "{}, 0", "", "ten", "1e3", "{} 0"]
    )
    def test_a_length_of_json_in_another_form(self, length: str, gateway: Running) -> None:
        """Triton takes +5 for 5; HAProxy compared such a length with no limit, 300 became 44, and brackets ended it."""
        body = json_request(300)
        headers = {"Inference-Header-Content-Length": length.format(len(body), len(body))}
        answer = request(gateway.http_url, INFER, body, headers=headers)
        assert (answer.status, "Inference-Header-Content-Length" in answer.json()["error"]) == (400, True)

    @pytest.mark.parametrize(
        ("lines", "status", "text"),
        [
            (["GET /v2 HTTP/9.9"], 505, "expected HTTP/1.0, HTTP/1.1 or HTTP/2"),
            (["GET /v2 HTTP/1.1", "X: a\0b"], 400, "a header contains a zero byte"),
            (["GET /v2/health/live HTTP/1.1", "X: a\0b"], 400, "a header contains a zero byte"),
            ([f"POST {INFER} HTTP/1.1", f"Content-Length: {2**64}"], 413, "Content-Length is too large"),
            (["GET /v2 HTTP/1.1", *(f"X-{n}: a" for n in range(200))], 400, "invalid request"),
            (["GET /v2 HTTP/1.1", "X Y: a"], 400, "invalid request"),
            ([f"POST {INFER} HTTP/1.1", "inference-header-content-length: 5"], 400, "sent twice"),
            *(
                ([first, f"Content-Length: {length}"], 413, "too large")
                for first in (f"POST {INFER} HTTP/1.1", "GET /v2 HTTP/1.1")
                for length in (2**31 + 1000, 3_000_000_000, 2**32 + 1000)
            ),
        ],
        ids=str,
    )
    def test_invalid_http(self, lines: list[str], status: int, text: str, gateway: Running) -> None:
        """HAProxy 2.6 has fixed answers in HTML to many headers and to invalid names; it takes the others.

        It takes a length of 2**64 for 0, and compares lengths in 32 bits: 2**32 + 1000 was 1000, and 3e9 was below 0.
        """
        ours = ["Host: a", f"Authorization: Bearer {KEY}", "Inference-Header-Content-Length: 0", "Connection: close"]
        if "sent twice" in text:
            ours.append("Content-Length: 0")
        answer = raw_answer(gateway, "\r\n".join([*lines, *ours]).encode() + b"\r\n\r\n0\r\n\r\n")
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        assert text in answer.partition(b"\r\n\r\n")[2].decode()

    def test_pixels_that_look_like_json_are_pixels(self, gateway: Running) -> None:
        """An image whose bytes continue the JSON in front of it."""
        text = (b'"data":[1],{"inputs":[{"data":[300]}]}' * 100)[:3072]
        body, headers = binary_request("pixels", np.frombuffer(text, np.uint8).reshape(1, 32, 32, 3))
        assert request(gateway.http_url, INFER, body, headers=headers).status == 200

    def test_json_for_those_who_must(self, open_gateway: Open) -> None:
        gateway = open_gateway(json_bytes=20_000)
        body = json_request(7)
        assert request(gateway.http_url, INFER, body).status == 200
        answer = request(gateway.http_url, INFER, body + b" " * 20_000)
        assert answer.status == 400
        assert "above 20000 bytes" in answer.json()["error"]

    def test_unfinished_bodies_leave_the_service_to_others(self, gateway: Running, pixels: np.ndarray) -> None:
        head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 3072\r\n"
        head += "Inference-Header-Content-Length: 0\r\n\r\n"
        held = [socket.create_connection(("127.0.0.1", gateway.http_port)) for _ in range(100)]
        for connection in held:
            connection.sendall(head.encode() + b"abcd")
        body, headers = binary_request("pixels", pixels)
        assert request(gateway.http_url, INFER, body, headers=headers).status == 200
        for connection in held:
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):  # it was held all the time
                connection.recv(1)
            connection.close()

    @pytest.mark.nightly
    def test_a_stranger_whose_body_stops_is_refused_within_seconds(self, gateway: Running) -> None:
        """`raw_answer` waits for 20 s at most; without a limit of its own, the gateway would wait for 60 s."""
        head = f"POST {INFER} HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n".encode()
        assert raw_answer(gateway, head + b"ab").startswith(b"HTTP/1.1 408 ")

    def test_a_stranger_gets_an_answer_before_the_end_of_a_large_body(self, gateway: Running) -> None:
        head = f"POST {INFER} HTTP/1.1\r\nHost: a\r\nContent-Length: 9000000\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", gateway.http_port), timeout=20) as connection:
            connection.sendall(head + bytes(1_300_000))
            assert connection.recv(100).startswith(b"HTTP/1.1 401 ")

    @pytest.mark.nightly
    def test_streams_of_strangers_are_not_held(self, gateway: Running, pixels: np.ndarray) -> None:
        """20,000 requests whose bodies stop were held for a minute, with 17 kB each."""
        held = grpc_requests.VALID["100 streams whose messages stop, on 100 connections"]()
        assert isinstance(held, Held)
        connections = []
        for port in (gateway.http_port, gateway.grpc_port):
            for _ in range(held.connections):
                connections.append(socket.create_connection(("127.0.0.1", port), timeout=5))
                connections[-1].sendall(held.begin)
        body, headers = binary_request("pixels", pixels)
        answer = request(gateway.http_url, INFER, body, headers=headers)
        metrics = request(gateway.metrics_url, "/metrics/gateway").body.decode()
        for connection in connections:
            connection.close()
        assert answer.status == 200
        names = [f'haproxy_backend_current_sessions{{proxy="refusing_{protocol}"}} ' for protocol in ("http", "grpc")]
        now = [int(line.rpartition(" ")[2]) for line in metrics.splitlines() if line.startswith(tuple(names))]
        assert len(now) == 2
        assert max(now) <= 501, now

    @pytest.mark.alone
    def test_bursts_of_unfinished_requests_do_not_fill_the_memory(self, open_gateway: Open) -> None:
        """HAProxy kept up to 110 MB after each burst, 355 MB after five."""
        gateway = open_gateway()
        held = grpc_requests.VALID["100 streams whose messages stop, on 100 connections"]()
        assert isinstance(held, Held)

        def resident_mb() -> int:
            return int(Path(f"/proc/{gateway.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

        def burst() -> bool:
            """Return whether HAProxy has read so much that its memory grew."""
            connections = [socket.create_connection(("127.0.0.1", gateway.grpc_port), timeout=5) for _ in range(100)]
            for connection in connections:
                connection.sendall(held.begin)
            large = resident_mb() >= 40
            for connection in connections:
                connection.close()
            return large

        assert resident_mb() < 30
        for _ in range(6):
            wait_until(burst, "a burst that takes memory")
        assert resident_mb() < 200


class TestGrpc:
    def test_a_key_opens_the_model(self, gateway: Running, bundle: Bundle, pixels: np.ndarray) -> None:
        with Stub(gateway.grpc_url) as stub:
            answer, metadata = stub.call("ModelInfer", grpc_request("pixels", pixels))
        logits = np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(-1, 10)
        assert float(np.abs(logits - bundle.golden()[1]).max()) < 1e-5
        assert metadata["x-gmmvit-bundle"] == bundle.sha256
        assert metadata["x-gmmvit-runner"] == gateway.models.runner

    @pytest.mark.parametrize("rows", [1, 8, 300])
    def test_no_key(self, rows: int, gateway: Running) -> None:
        """A message above HAProxy's buffer gets the same status; it was CANCELLED before refuse.lua."""
        message = grpc_request("pixels", np.zeros((rows, 32, 32, 3), np.uint8))
        for key in (None, "another-key-that-nobody-has"):
            with Stub(gateway.grpc_url, key=key) as stub:
                code, text = stub.code("ModelInfer", message)
                assert code == grpc.StatusCode.UNAUTHENTICATED
                assert "Bearer KEY" in text

    @pytest.mark.parametrize("rows", [1400, 10_000, 28_000])
    def test_too_large(self, rows: int, gateway: Running) -> None:
        """The last message is larger than what refuse.lua reads before it answers."""
        with Stub(gateway.grpc_url) as stub:
            code, text = stub.code("ModelInfer", grpc_request("pixels", np.zeros((rows, 32, 32, 3), np.uint8)))
            assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "too large" in text
            assert stub.call("ServerReady", service_pb2.ServerReadyRequest())[0].ready

    @pytest.mark.parametrize(
        ("method", "message"),
        [
            ("LogSettings", service_pb2.LogSettingsRequest()),
            ("TraceSetting", service_pb2.TraceSettingRequest()),
            ("RepositoryIndex", service_pb2.RepositoryIndexRequest()),
            ("RepositoryModelUnload", service_pb2.RepositoryModelUnloadRequest(model_name="gmmvit")),
            ("SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest()),
            ("SystemSharedMemoryRegister", service_pb2.SystemSharedMemoryRegisterRequest(name="a", key="b")),
            ("CudaSharedMemoryStatus", service_pb2.CudaSharedMemoryStatusRequest()),
        ],
    )
    def test_methods_of_nobody(self, method: str, message: Any, gateway: Running) -> None:
        with Stub(gateway.grpc_url) as stub:
            assert stub.code(method, message)[0] == grpc.StatusCode.UNIMPLEMENTED

    def test_metadata_and_statistics(self, gateway: Running) -> None:
        with Stub(gateway.grpc_url) as stub:
            assert stub.call("ServerMetadata", service_pb2.ServerMetadataRequest())[0].name == "triton"
            config, _ = stub.call("ModelConfig", service_pb2.ModelConfigRequest(name="gmmvit"))
            assert config.config.name == "gmmvit"
            stats, _ = stub.call("ModelStatistics", service_pb2.ModelStatisticsRequest(name="gmmvit_network"))
            assert stats.model_stats[0].name == "gmmvit_network"

    def test_statistics_need_the_secret(self, triton: Running) -> None:
        statistics = service_pb2.ModelStatisticsRequest(name="gmmvit_network")
        with Stub(triton.grpc_url) as stub:
            assert stub.code("ModelStatistics", statistics)[0] == grpc.StatusCode.UNAVAILABLE
            metadata = ((f"triton-grpc-protocol-{ADMIN_HEADER}", SECRET),)
            assert stub.call("ModelStatistics", statistics, metadata=metadata)[0].model_stats

    def test_compressed_messages(self, gateway: Running, pixels: np.ndarray) -> None:
        with Stub(gateway.grpc_url) as stub:
            message = grpc_request("pixels", np.zeros((8, 32, 32, 3), np.uint8))
            code, text = stub.code("ModelInfer", message, compression=grpc.Compression.Gzip)
            assert code == grpc.StatusCode.UNIMPLEMENTED
            assert "compressed" in text
            assert stub.call("ModelInfer", grpc_request("pixels", pixels))[0].model_name == "gmmvit_network"

    def test_typed_contents_that_cannot_wrap_are_left_alone(self, gateway: Running) -> None:
        image = io.BytesIO()
        Image.new("RGB", (32, 32)).save(image, "PNG")
        message = service_pb2.ModelInferRequest(model_name="gmmvit")
        tensor = message.inputs.add(name="IMAGE", datatype="BYTES", shape=[1, 1])
        tensor.contents.bytes_contents.append(image.getvalue())
        with Stub(gateway.grpc_url) as stub:
            assert stub.call("ModelInfer", message)[0].model_name == "gmmvit"

    @pytest.mark.nightly
    @pytest.mark.parametrize("size", [1, 4, 5, 6, 7, 40, 5000])
    def test_bytes_that_are_no_message_leave_the_gateway_running(self, size: int, gateway: Running) -> None:
        """Raw bytes in the place of a message: Triton refuses them, and the gateway goes on."""
        for seed in range(8):
            body = np.random.default_rng(seed).bytes(size)
            with Stub(gateway.grpc_url) as stub:
                call = stub.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
                with pytest.raises(grpc.RpcError) as caught:
                    call(body, timeout=10, metadata=stub.metadata)
                assert caught.value.code() != grpc.StatusCode.INTERNAL, caught.value.details()
        assert request(gateway.http_url, "/v2").status == 200

    def test_what_triton_refuses_keeps_its_status(self, gateway: Running) -> None:
        with Stub(gateway.grpc_url) as stub:
            code, text = stub.code("ModelInfer", grpc_request("pixels", np.zeros((1, 31, 32, 3), np.uint8)))
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            assert "unexpected shape" in text


class TestFront:
    def test_requests_reach_the_front_with_client_and_secret(self, open_gateway: Open) -> None:
        from http.server import BaseHTTPRequestHandler, HTTPServer
        from threading import Thread

        seen: list[dict[str, str]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                seen.append({name.lower(): value for name, value in self.headers.items()})
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=server.serve_forever, daemon=True).start()
        gateway = open_gateway(front=Front(port=server.server_port, secret=SECRET))
        spoofed = {"x-gmmvit-client": "root", "x-gmmvit-front": "guess"}
        assert request(gateway.http_url, "/classify?top=3", b"photo", headers=spoofed).status == 200
        assert seen[0]["x-gmmvit-client"] == "tester"
        assert seen[0]["x-gmmvit-front"] == SECRET
        assert "authorization" not in seen[0]
        assert request(gateway.http_url, "/classify", bytes(MAX_BODY_BYTES + 1)).status == 413
        assert request(gateway.http_url, "/classify", b"photo", key=None).status == 401
        assert request(gateway.http_url, "/classify", b"x", headers={"Content-Encoding": "br"}).status == 415
        assert request(gateway.http_url, "/classify").status == 404
        assert len(seen) == 1
        server.shutdown()
        server.server_close()
        refused = json.loads(request(gateway.http_url, "/v1/embeddings", b"{}").body)["error"]  # by HAProxy itself
        reason = "the server is overloaded or not ready; retry later"
        assert refused == {"message": reason, "type": "invalid_request_error", "param": None, "code": None}


@pytest.mark.nightly
class TestTls:
    def test_https_http2_and_grpcs(self, open_gateway: Open, pixels: np.ndarray, tmp_path: Path) -> None:
        made = self_signed(tmp_path)
        cert, gateway = made.certificate, open_gateway(tls_cert=made.certificate, tls_key=made.private_key)
        body, headers = binary_request("pixels", pixels)
        assert gateway.http_url.startswith("https://")
        assert request(gateway.http_url, INFER, body, headers=headers, ca=cert).status == 200
        assert request(gateway.metrics_url, "/metrics", ca=cert).status == 200
        with Stub(gateway.grpc_url, ca=cert) as stub:
            assert stub.call("ModelInfer", grpc_request("pixels", pixels))[0].model_name == "gmmvit_network"
        with Stub(gateway.grpc_url, key=None, ca=cert) as stub:
            large = grpc_request("pixels", np.zeros((300, 32, 32, 3), np.uint8))
            assert stub.code("ModelInfer", large)[0] == grpc.StatusCode.UNAUTHENTICATED
        assert self.curl(f"{gateway.http_url}/v2", cert) == "200 2"
        raw = ("-X", "POST", "-T", "-", "-H", "Inference-Header-Content-Length: 0")  # a body without its length
        assert self.curl(gateway.http_url + INFER, cert, *raw) == "411 2"

    def curl(self, url: str, cert: Path, *options: str) -> str:
        """Return status and version of HTTP.  The body of a request with a body is an image."""
        if shutil.which("curl") is None:
            pytest.skip("no curl on PATH")
        command = ["curl", "--silent", "--cacert", str(cert), "--http2", "--noproxy", "*", "-o", os.devnull]
        command += ["-H", f"Authorization: Bearer {KEY}", "-w", "%{http_code} %{http_version}", *options, url]
        return subprocess.run(command, capture_output=True, check=True, timeout=30, input=bytes(3072)).stdout.decode()

    def test_a_new_certificate_is_loaded(self, open_gateway: Open, tmp_path: Path) -> None:
        made, new = self_signed(tmp_path), self_signed(tmp_path, "new")
        gateway = open_gateway(tls_cert=made.certificate, tls_key=made.private_key)
        shutil.copy(new.private_key, made.private_key)
        gateway.reload()  # the new key without its certificate: nothing changes
        assert request(gateway.http_url, "/v2", ca=made.certificate).status == 200
        shutil.copy(new.certificate, made.certificate)
        gateway.reload()
        assert request(gateway.http_url, "/v2", ca=new.certificate).status == 200


@pytest.mark.nightly
class TestReload:
    def test_keys_change_without_a_restart(self, open_gateway: Open, tmp_path: Path) -> None:
        lines: list[str] = []
        keys = key_file(tmp_path)
        gateway = open_gateway(keys=keys, on_log_line=lines.append)
        kept = http.client.HTTPConnection("127.0.0.1", gateway.http_port, timeout=20)
        assert request(gateway.http_url, "/v2", connection=kept).status == 200
        pid = gateway.pid
        many = (f"more {hashlib.sha256(str(number).encode()).hexdigest()}" for number in range(3000))
        key_file(tmp_path, f"other {OTHER_KEY}", *many)  # more than HAProxy takes in a command
        accepted = lambda: request(gateway.http_url, "/v2", key=OTHER_KEY).status == 200  # noqa: E731
        wait_until(accepted, "a request with the new key", step=gateway.step)
        assert request(gateway.http_url, "/v2", connection=kept).status == 401  # on the same connection
        assert request(gateway.http_url, "/v2", key=OTHER_KEY).status == 200
        key_file(tmp_path, "broken")
        gateway.reload()
        assert request(gateway.http_url, "/v2", key=OTHER_KEY).status == 200
        assert any("nothing was reloaded" in line and "keys.txt:2" in line for line in lines)
        assert gateway.pid == pid
        kept.close()


@pytest.mark.nightly
class TestRestart:
    def test_a_killed_haproxy_is_started_again(self, open_gateway: Open) -> None:
        lines: list[str] = []
        gateway = open_gateway(on_log_line=lines.append)
        self.kill(gateway)
        assert any("HAProxy has ended (signal SIGKILL) and is started again" in line for line in lines)
        assert request(gateway.http_url, "/v2").status == 200
        assert "gmmvit_gateway_restarts_total 1" in request(gateway.metrics_url, "/metrics").body.decode()

    def test_again_and_again_is_an_error(self, open_gateway: Open) -> None:
        gateway = open_gateway()
        for _ in range(5):
            self.kill(gateway)
        with pytest.raises(ServerError, match="HAProxy ended 6 times in a minute"):
            self.kill(gateway)

    def kill(self, gateway: Running) -> None:
        """Kill HAProxy, and let the gateway notice it."""
        before = gateway.restarts
        os.kill(gateway.pid, signal.SIGKILL)
        wait_until(lambda: gateway.restarts > before, "a restart of HAProxy", step=gateway.step)


class TestObservability:
    def test_a_line_for_each_request(self, open_gateway: Open, bundle: Bundle, pixels: np.ndarray) -> None:
        gateway = open_gateway()
        body, headers = binary_request("pixels", pixels)
        assert request(gateway.http_url, INFER, body, headers=headers).status == 200
        assert request(gateway.http_url, '/v2/"quoted"', key=None).status == 401
        with Stub(gateway.grpc_url) as stub:
            stub.call("ModelInfer", grpc_request("pixels", pixels))
        with Stub(gateway.grpc_url, key=None) as stub:
            stub.code("ModelInfer", grpc_request("pixels", pixels))
        over_http, refused, over_grpc, refused_grpc = log_lines(gateway, 4)
        assert {
            "client": "tester",
            "model": "gmmvit_network",
            "status": 200,
            "protocol": "http",
        }.items() <= over_http.items()
        assert over_http["bundle"] == over_grpc["bundle"] == bundle.sha256
        assert over_http["bytes_in"] > len(body)
        assert over_http["bytes_out"] > 8 * 10 * 4
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", over_http["time"])
        assert over_http["queue_ms"] >= 0
        assert over_http["total_ms"] >= over_http["network_ms"] >= 0
        assert over_http["server"] == over_grpc["server"] == "triton"
        assert 0 < over_http["network_us"] / 1000 <= over_http["total_ms"] + 1
        assert over_grpc["network_us"] > 0 > refused["network_us"]
        assert {"client": "-", "status": 401, "path": '/v2/"quoted"'}.items() <= refused.items()
        assert refused["refused"].startswith("401 ")
        assert {"client": "tester", "model": "gmmvit_network", "protocol": "grpc"}.items() <= over_grpc.items()
        assert {"client": "-", "grpc_status": "16"}.items() <= refused_grpc.items()
        assert KEY not in gateway.settings.access_log.read_text()
        assert request(gateway.http_url, "/v2/health/ready").status == 200
        ready = log_lines(gateway, 5)[-1]
        ends = [line["end"] for line in (over_http, over_grpc, ready, refused, refused_grpc)]
        assert ends == ["--", "--", "LR", "LR", "LR"]

    @pytest.mark.nightly
    def test_every_line_is_json_whatever_clients_send(self, open_gateway: Open, tmp_path: Path) -> None:
        made = self_signed(tmp_path)
        gateway = open_gateway(tls_cert=made.both)
        context = ssl.create_default_context(cafile=made.certificate)
        bearer = f"Authorization: Bearer {KEY}\r\n".encode()
        sent = [
            b'GET /v2/models/"x"/ready HTTP/1.1\r\nHost: x\r\n' + bearer + b"\r\n",
            b"GET /v2/models/" + b"m" * 20_000 + b"/ready HTTP/1.1\r\nHost: x\r\n" + bearer + b"\r\n",
            b"GET /" + b'\\"\x01' * 3000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET /%00%22%0a" + "é".encode() * 3000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
            b"M" * 9000 + b" / HTTP/1.1\r\nHost: x\r\n\r\n",
            b'"}\r\n\r\n',
            b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: no\r\n\r\n",
        ]
        for data in sent:
            with (
                socket.create_connection(("127.0.0.1", gateway.http_port), timeout=20) as plain,
                context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
            ):
                connection.sendall(data)
                connection.recv(100)
        for data in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x00\x05hello"):  # no TLS, broken TLS
            with socket.create_connection(("127.0.0.1", gateway.http_port), timeout=20) as plain:
                plain.sendall(data)
                plain.recv(100)
        lines = log_lines(gateway, len(sent) + 2)
        assert len(lines) == len(sent) + 2
        assert lines[-3]["end"] == "PR"
        assert [line["model"] for line in lines[:2]] == ["-", "-"]
        assert [line["refused"] for line in lines[-3:]] == ["malformed_request", *["SSL handshake failure"] * 2]
        gateway.stop()
        assert len([json.loads(line) for line in gateway.settings.access_log.read_text().splitlines()]) == len(lines)

    def test_all_metrics_need_a_key(self, gateway: Running) -> None:
        """`tests/test_client_examples.py` has the series that the alert rules read."""
        assert "haproxy_" in request(gateway.metrics_url, "/metrics/gateway").body.decode()
        assert request(gateway.metrics_url, "/metrics/server").status == 404
        assert request(gateway.metrics_url, "/metrics", key=None).status == 401
        assert request(gateway.metrics_url, "/other").status == 404


@pytest.mark.nightly
class TestReadiness:
    def test_a_network_that_does_not_answer_is_not_ready(self, repository: Repository, tmp_path: Path) -> None:
        """Triton itself says ready for ever after `kill -9` of the worker of the network."""
        models = tmp_path / "models"
        shutil.copytree(repository.path, models)
        with running_service(models, tmp_path) as service:
            gateway, server = service.gateway, service.server
            for probe in ("live", "ready"):
                assert request(gateway.http_url, f"/v2/health/{probe}", key=None).status == 200
            os.kill(stub_of(server.pid, "gmmvit_network").pid, signal.SIGKILL)
            readiness = lambda: request(gateway.http_url, "/v2/health/ready", key=None).status  # noqa: E731
            wait_until(lambda: readiness() != 200, "a service that is not ready")
            assert readiness() == 503
            assert request(server.http_url, "/v2/health/ready").status == 200
            answer = request(gateway.http_url, INFER, bytes(3072), headers=RAW)
            assert answer.status == 503
            assert answer.headers["retry-after"] == "1"
            with Stub(gateway.grpc_url) as stub:
                code, text = stub.code("ServerReady", service_pb2.ServerReadyRequest())
                assert (code, text) == (grpc.StatusCode.UNAVAILABLE, "no server is ready")


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A stand-in for a network that takes 0.3 s for an image, and two images at the same time."""
    models = sleeping_repository(tmp_path_factory.mktemp("slow") / "models", sleep_s=0.3)
    with TritonServer(models, options=behind_gateway(ServerOptions(**FREE_PORTS), SECRET)) as running:
        yield running


@pytest.mark.nightly
class TestOverload:
    def test_http(self, slow: TritonServer, open_gateway: Open) -> None:
        """Two requests are in the server, four wait until their time is over, and the others are refused at once."""
        gateway = open_gateway(slow, in_flight=2, queue_limit=4, queue_timeout_ms=150)

        def ask(_: int) -> Answer:
            return request(gateway.http_url, INFER, bytes(3072), headers=RAW)

        with ThreadPoolExecutor(16) as pool:
            with answers_held(slow.repository):
                asked = [pool.submit(ask, number) for number in range(16)]
                wait_until(lambda: sum(each.done() for each in asked) == 14, "14 refusals")
            answers = [each.result() for each in asked]
        assert sorted(answer.status for answer in answers) == [200] * 2 + [503] * 14
        assert all(answer.headers["retry-after"] == "1" for answer in answers if answer.status == 503)
        ends = [line["end"] for line in log_lines(gateway, 16) if line["status"] == 503]
        assert set(ends) <= {"sQ", "LR"}
        assert ends.count("sQ") >= 4  # their time was over
        assert ask(0).status == 200

    @pytest.mark.parametrize("size", [1, 200_000], ids=["waits", "above the buffer"])
    def test_grpc(self, size: int, slow: TritonServer, open_gateway: Open) -> None:
        gateway = open_gateway(slow, in_flight=2, queue_limit=4, queue_timeout_ms=150)
        message = grpc_request("pixels", np.zeros((1, 32, 32, 3), np.uint8))
        for _ in range(size // 4000):
            message.outputs.add(name="logits").parameters["unused"].string_param = "x" * 4000
        with Stub(gateway.grpc_url) as stub, ThreadPoolExecutor(16) as pool:

            def ask(_: int) -> tuple[str, str]:
                try:
                    stub.call("ModelInfer", message)
                except grpc.RpcError as exc:
                    return exc.code().name, str(exc.details())
                return "OK", ""

            answers = list(pool.map(ask, range(16)))
            assert {code for code, _ in answers} == {"OK", "RESOURCE_EXHAUSTED"}
            assert {text for code, text in answers if code != "OK"} == {"the server is overloaded; retry later"}
            assert ask(0) == ("OK", "")

    def test_the_limit_of_the_queue_counts_both_protocols(self, slow: TritonServer, open_gateway: Open) -> None:
        """Both queues together hold 3 requests, so a fourth is refused at once, while all others wait."""
        gateway = open_gateway(slow, in_flight=1, queue_limit=3, queue_timeout_ms=60_000)
        message = grpc_request("pixels", np.zeros((1, 32, 32, 3), np.uint8))
        with Stub(gateway.grpc_url) as stub, ThreadPoolExecutor(5) as pool:

            def ask() -> int:
                return request(gateway.http_url, INFER, bytes(3072), headers=RAW).status

            with answers_held(slow.repository):
                held = [pool.submit(stub.call, "ModelInfer", message) for _ in range(4)]
                wait_until(lambda: backend_sessions(gateway, "triton_grpc") == 4, "four requests over gRPC")
                held_http = pool.submit(ask)
                wait_until(lambda: backend_sessions(gateway, "triton_http") == 1, "a request over HTTP")
                assert ask() == 503
                assert not any(future.done() for future in (*held, held_http))
            assert held_http.result() == 200
            for future in held:
                future.result()


def metrics_text(where: dict[str, Any]) -> str:
    return request(where["metrics"], "/metrics").body.decode()


class TestCommand:
    def test_serve_with_a_gateway_until_sigterm(self, repository: Repository, tmp_path: Path) -> None:
        models = tmp_path / "models"
        shutil.copytree(repository.path, models)
        log = tmp_path / "access.log"
        keys = key_file(tmp_path)
        words = ("--keys", str(keys), "--access-log", str(log), "--log", str(tmp_path / "log"))
        with Serve(models, "--gateway", *words) as running:
            process, where = running.process, running.ready()
            assert request(where["http"], INFER, bytes(3072), headers=RAW).status == 200
            assert request(where["http"], INFER, bytes(3072), headers=RAW, key=None).status == 401
            assert where["gateway_pid"] > 0
            keys.touch()
            wait_until(lambda: "key_reloads_total 1" in metrics_text(where), "the keys are loaded again")
            port = urlsplit(where["http"]).port
            assert port is not None
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(f"POST {INFER} HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\nab".encode())
                wait_until(lambda: everything_was_read(port), "HAProxy has read what the stranger sent")
                process.send_signal(signal.SIGTERM)
                _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
        assert re.search(r"^\d{4}-\d\d-\d\dT[\d:]{8}Z gmmvit serve: gateway: reloaded 1 key$", errors, re.M)
        assert triton_in_words(where["triton"]) in errors
        # HAProxy writes messages at its end; every line of the access log is JSON all the same. 408: a body that a
        # stranger does not complete held the exit up for 25 s, before the gateway had a limit for it.
        assert [json.loads(line)["status"] for line in log.read_text().splitlines()] == [200, 401, 408]
        assert "cumulated" not in errors
        wait_gone(str(models))
        assert not Path(f"/proc/{where['gateway_pid']}").exists()


class TestRefusals:
    def test_a_port_in_use(self, gateway: Running, tmp_path: Path) -> None:
        settings = GatewaySettings(keys=key_file(tmp_path))
        with pytest.raises(
            ServerError, match=rf"gRPC port {gateway.grpc_port} on 127\.0\.0\.1 cannot be opened"
        ) as caught:
            Gateway(settings, **{**FREE_PORTS, "grpc_port": gateway.grpc_port})
        assert "--grpc-port" in caught.value.hint

    def test_an_address_of_another_machine(self, tmp_path: Path) -> None:
        with pytest.raises(ServerError, match=r"--listen 192\.0\.2\.1|192\.0\.2\.1 cannot be opened"):
            Gateway(GatewaySettings(keys=key_file(tmp_path), listen="192.0.2.1", insecure=True), **FREE_PORTS)
