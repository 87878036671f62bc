"""Faults of Triton that NVIDIA has published: what is left of them behind a gateway, and without one.

docs/pages/protection.md lists the faults.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

import gmmvit_deploy
from gmmvit_deploy.serving.installs import wheel_server
from gmmvit_deploy.serving.repository import Repository
from gmmvit_deploy.serving.server import TritonServer
from gmmvit_deploy.serving.service import Service
from tests.browser import open_chromium
from tests.documented import PAGES, table
from tests.haproxy import needs_haproxy
from tests.serving.commands import metric_values
from tests.serving.gateways import BEARER, KEY, Stub, grpc_request, request, running_service
from tests.serving.stand_in import MODEL, infer_body
from tests.waiting import wait_until

INFER = "/v2/models/gmmvit_network/infer"
REGISTER = "/v2/systemsharedmemory/region/r/register"
OWN = re.compile(r"/dev/shm/(gmmvit-run-\S+)")


@pytest.fixture(scope="module")
def service(repository: Repository, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_service(repository.path, tmp_path_factory.mktemp("faults")) as running:
        yield running


def own_region(pid: int) -> str:
    """Return the name of a region of shared memory that Triton's Python backend has mapped."""
    return OWN.findall(Path(f"/proc/{pid}/maps").read_text())[0]


def region_request(key: str) -> bytes:
    return json.dumps({"key": f"/{key}", "offset": 0, "byte_size": 64}).encode()


def with_region(message: Any) -> Any:
    """Let the input of a request come from the region ``r``, which `REGISTER` would have registered."""
    del message.raw_input_contents[:]
    message.inputs[0].parameters["shared_memory_region"].string_param = "r"
    message.inputs[0].parameters["shared_memory_byte_size"].int64_param = 64
    return message


@pytest.mark.integration
@needs_haproxy
@pytest.mark.parametrize("key", [KEY, None], ids=["key", "stranger"])
@pytest.mark.parametrize("path", [INFER, "/v2/models/gmmvit_network/generate", "/v2/logging", "/classify", "/metrics"])
def test_no_chunked_body_passes_the_gateway(path: str, key: str | None, service: Service) -> None:
    """CVE-2025-23310 and CVE-2025-23311: Triton took stack for each chunk."""
    pid = service.server.pid
    address = urlsplit(service.metrics_url if path == "/metrics" else service.http_url)
    head = [f"POST {path} HTTP/1.1", "Host: a", "Transfer-Encoding: chunked", "Connection: close"]
    if key:
        head.append(f"Authorization: {BEARER['Authorization']}")
    with socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=20) as connection:
        connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + b"1\r\na\r\n" * 10_000 + b"0\r\n\r\n")
        status = connection.makefile("rb").readline().split()[1]
    refusals = {INFER: b"411", "/classify": b"411"}
    assert status == (refusals.get(path, b"404") if key else b"401")
    assert service.server.pid == pid
    assert request(service.http_url, "/v2/health/ready").status == 200


@pytest.mark.integration
@needs_haproxy
def test_nobody_registers_memory_of_the_server_through_the_gateway(service: Service) -> None:
    """CVE-2025-23319 and CVE-2025-23334: the Python backend's own region, as input and output of a request."""
    region = own_region(service.server.pid)
    for key, status, code in ((KEY, 404, grpc.StatusCode.UNIMPLEMENTED), (None, 401, grpc.StatusCode.UNAUTHENTICATED)):
        assert request(service.http_url, REGISTER, region_request(region), key=key).status == status
        message = service_pb2.SystemSharedMemoryRegisterRequest(name="r", key=f"/{region}", byte_size=64)
        with Stub(service.grpc_url, key=key) as stub:
            assert stub.code("SystemSharedMemoryRegister", message)[0] == code
    with Stub(service.grpc_url) as stub:
        pixels = np.zeros((1, 32, 32, 3), np.uint8)
        assert "shared memory region" in stub.code("ModelInfer", with_region(grpc_request("pixels", pixels)))[1]
        assert stub.call("ModelInfer", grpc_request("pixels", pixels))[0].outputs[0].name == "logits"


@pytest.mark.integration
def test_nobody_registers_memory_of_a_server_without_a_gateway(stand_in: TritonServer) -> None:
    region = own_region(stand_in.pid)
    assert request(stand_in.http_url, REGISTER, region_request(region)).status == 403
    for path in ("/v2/logging", "/v2/trace/setting", "/v2/repository/index"):
        assert request(stand_in.http_url, path, b"{}").status == 403
    message = service_pb2.SystemSharedMemoryRegisterRequest(name="r", key=f"/{region}", byte_size=64)
    with Stub(stand_in.grpc_url) as stub:
        assert "restricted" in stub.code("SystemSharedMemoryRegister", message)[1]
    assert request(stand_in.http_url, f"/v2/models/{MODEL}/infer", infer_body(1)).status == 200
    assert request(stand_in.http_url, f"/v2/models/{MODEL}/stats").status == 200


@pytest.mark.integration
@needs_haproxy
def test_no_stream_passes_the_gateway(service: Service) -> None:
    """CVE-2025-23322: a stream that is cancelled before it is processed."""
    with Stub(service.grpc_url) as stub:
        message = grpc_request("pixels", np.zeros((1, 32, 32, 3), np.uint8))
        stream = stub.service.ModelStreamInfer(iter([message]), metadata=stub.metadata, timeout=20)
        with pytest.raises(grpc.RpcError) as refused:
            next(stream)
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.integration
@needs_haproxy
def test_a_request_for_very_many_outputs_is_an_error(service: Service) -> None:
    """CVE-2026-24146: a large number of outputs."""
    pid, message = service.server.pid, grpc_request("pixels", np.zeros((1, 32, 32, 3), np.uint8))
    for number in range(200_000):
        message.outputs.add(name=f"logits{number}")
    with Stub(service.grpc_url) as stub:
        assert stub.code("ModelInfer", message)[0] == grpc.StatusCode.INVALID_ARGUMENT
    assert service.server.pid == pid
    assert request(service.http_url, "/v2/health/ready").status == 200


@pytest.mark.integration
def test_the_server_has_the_python_backend_and_three_ports(stand_in: TritonServer) -> None:
    """CVE-2025-23268, CVE-2026-24213 to -24215: DALI; CVE-2025-23335: TensorRT; CVE-2025-33238: SageMaker's port."""
    assert wheel_server().backend_names == ("python",)
    sockets = {str(link.readlink()) for link in Path(f"/proc/{stand_in.pid}/fd").iterdir()}
    tables = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    rows = [line.split() for line in tables.splitlines()]
    listening = {
        int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets
    }
    assert listening == {stand_in.http_port, stand_in.grpc_port, stand_in.metrics_port}


@pytest.mark.integration
def test_the_page_counts_the_faults_that_it_lists() -> None:
    rows = [first for first, *_ in table("protection.md", "published fault")]
    listed = [cve for row in rows for cve in row.partition(": ")[2].split(", ")]
    assert all(re.fullmatch(r"CVE-\d{4}-\d{4,5}", cve) for cve in listed)
    assert len(set(listed)) == len(listed)
    assert f"published {len(listed)} faults" in (PAGES / "protection.md").read_text(encoding="utf-8")


# ---- requests that ended a server with the usual stack of 8 MiB ------------------------------------------------------


LAUNCHER = Path(gmmvit_deploy.__file__).parent / "files" / "_launch.py"
GIB = 1 << 30


def answers(server: TritonServer) -> bool:
    return request(server.http_url, f"/v2/models/{MODEL}/infer", infer_body(1)).status == 200


CHUNKED = f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()


def posted(body: bytes, header: str = "X: a") -> bytes:
    head = f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nHost: x\r\n{header}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.nightly
@pytest.mark.integration
@pytest.mark.parametrize(
    "sent",
    [
        posted(gzip.compress(b"[" * 250_000, mtime=0), "Content-Encoding: gzip"),
        posted(b"[" * 200_000),
        posted(b'{"a":' * 200_000),
        CHUNKED + b"1\r\na\r\n" * 2_000_000 + b"0\r\n\r\n",
    ],
    ids=["277 bytes of gzip", "200 kB of lists", "1 MB of objects", "two million chunks"],
)
def test_the_same_server_answers_after_deep_nesting(sent: bytes, stand_in: TritonServer) -> None:
    before = stand_in.pid
    assert answers(stand_in)
    with socket.create_connection(("127.0.0.1", stand_in.http_port), timeout=120) as connection:
        connection.sendall(sent)
        assert connection.recv(100).startswith((b"HTTP/1.1 400", b"HTTP/1.1 500"))
    assert answers(stand_in)
    stand_in.require_running()
    assert stand_in.pid == before


@pytest.mark.nightly
@pytest.mark.integration
def test_a_hard_limit_of_the_stack_below_what_was_asked_for_is_used_and_reported() -> None:
    hard = 16 << 20
    command = [sys.executable, "-I", str(LAUNCHER), f"--stack-bytes={GIB}", str(os.getpid())]
    answer = subprocess.run(
        [*command, "/bin/sh", "-c", "ulimit -s"],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, hard)),
    )
    assert answer.stdout == f"{hard >> 10}\n"
    assert f"the hard limit of the stack is {hard} bytes, expected {GIB}" in answer.stderr


# ---- pages of the web in a browser of this machine, which can send requests to loopback ------------------------------


STAND_IN_INFER = f"/v2/models/{MODEL}/infer"
READABLE = """async ([url, body, headers, mode]) => {
    try {
        const answer = await fetch(url, {method: body === null ? "GET" : "POST", body, headers, mode});
        return answer.type === "opaque" ? "sent" : answer.status;
    } catch (error) {
        return "refused";
    }
}"""
"""What the script of a page learns: the status of an answer, "sent" for an answer that it may not read, "refused"."""


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>page</title>")

    def log_message(self, *_: object) -> None:
        """Write no line for a request."""


@contextmanager
def page_at(url: str = "") -> Iterator[Any]:
    """Yield a page of another origin, or with DNS rebinding: of a name that leads to the server at ``url``."""
    web = ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    threading.Thread(target=web.serve_forever, args=(0.05,), daemon=True).start()
    try:
        with open_chromium("--no-sandbox", "--host-resolver-rules=MAP evil.example 127.0.0.1") as browser:
            page = browser.new_page()
            page.goto(f"http://evil.example:{urlsplit(url).port if url else web.server_address[1]}/v2")
            yield lambda url, body=None, headers=None, mode="cors": page.evaluate(
                READABLE, [url, body if body is None else body.decode(), headers or {}, mode]
            )
    finally:
        web.shutdown()
        web.server_close()


def answered(server: TritonServer) -> float:
    return sum(metric_values(server.metrics_url, "nv_inference_request_success").values())


def uses_region(server: TritonServer) -> str:
    """Return Triton's answer to an inference from the region of `REGISTER`."""
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": 4}
    body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1], "parameters": parameters}]}
    return request(server.http_url, STAND_IN_INFER, json.dumps(body).encode()).body.decode()


@pytest.mark.integration
def test_a_page_changes_nothing_and_reads_nothing(stand_in: TritonServer) -> None:
    url, pid, before = stand_in.http_url, stand_in.pid, answered(stand_in)
    plain = {"Content-Type": "text/plain"}
    with page_at() as ask:
        register = region_request(own_region(pid))
        assert ask(url + REGISTER, register, plain, "no-cors") == "sent"
        assert "Unable to find shared memory region: 'r'" in uses_region(stand_in)
        # Headers that Triton must know, for compressed and for binary bodies, need Triton's consent.
        for name, value in (("Content-Encoding", "gzip"), ("Inference-Header-Content-Length", "0")):
            assert ask(url + STAND_IN_INFER, infer_body(1), {name: value}) == "refused"
        assert ask(url + "/v2") == "refused"
        assert ask(f"http://127.0.0.1:{stand_in.metrics_port}/metrics") == "refused"
        assert (
            ask(f"http://127.0.0.1:{stand_in.grpc_port}/inference.GRPCInferenceService/ModelInfer", b"a") == "refused"
        )
        assert answered(stand_in) == before
        assert ask(url + STAND_IN_INFER, infer_body(1), plain) == "refused"
        # Computed, and not shown to the page. Triton counts an answer after it has sent it.
        wait_until(lambda: answered(stand_in) == before + 1, "an answer that Triton counts")
    stand_in.require_running()
    assert stand_in.pid == pid


@pytest.mark.integration
def test_a_page_with_dns_rebinding_reads_answers_and_changes_nothing(stand_in: TritonServer) -> None:
    with page_at(stand_in.http_url) as ask:
        assert ask(STAND_IN_INFER, infer_body(1)) == 200
        assert ask(REGISTER, region_request(own_region(stand_in.pid))) == 403
        assert ask("/v2/logging", b'{"log_info": false}') == 403
        assert ask("/v2/repository/models/stand_in/unload", b"{}") == 403
    assert "Unable to find shared memory region: 'r'" in uses_region(stand_in)


@pytest.mark.integration
@needs_haproxy
@pytest.mark.parametrize("rebinding", [False, True], ids=["page", "rebinding"])
def test_a_page_reaches_nothing_behind_a_gateway(service: Service, rebinding: bool) -> None:
    url, log = service.http_url, service.gateway.settings.access_log
    assert log is not None
    before = len(log.read_text().splitlines())
    with page_at(url if rebinding else "") as ask:
        for path in (INFER, "/classify", "/v2"):
            assert ask(path if rebinding else url + path, infer_body(1)) == (401 if rebinding else "refused")
    assert request(url, "/v2/health/ready").status == 200
    lines = [json.loads(line) for line in log.read_text().splitlines()[before:]]
    over_http = [line for line in lines if line["protocol"] == "http"]
    assert {line["status"] for line in over_http if line.get("method") == "POST"} == {401}
